"""Draw the figures of runs and studies, as PNG bytes.

Colours are the palette of Okabe and Ito, with wine and olive of Tol's, which are safe for colour-blind readers. Every
arm also has its own marker, so that figures stay readable in black and white. matplotlib is imported where a
figure is drawn: its import is slow, and most commands draw nothing.

A figure of a study shows one slice of the grid through its headline setting.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.names import CEILING, CONTROL, GRAFT, NATIVE, PLAIN, RANDOM, RETRAINED, TABLE, VANILLA
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ArmResult, Report
from mtp_train.report.tables import context_words
from mtp_train.report.wording import group_arms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, FAINT = "#222222", "#d9d9d9"
PLAIN_LINE: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (4, 3))}
"""Style of the line at 1, the speed and tau of plain decoding."""
WIDTH_INCHES = 5.2
PIXELS_PER_INCH = 200
MAX_LABEL_CHARS = 26
INTERVALS = "with 95 % intervals over groups of prompts"


class Look(NamedTuple):
    """Colour and marker of an arm, the same in every figure."""

    colour: str
    marker: str


LOOKS = {
    PLAIN: Look("#666666", "X"),
    NATIVE: Look("#E69F00", "P"),
    GRAFT: Look("#D55E00", "s"),
    RETRAINED: Look("#0072B2", "o"),
    VANILLA: Look("#009E73", "^"),
    CONTROL: Look("#CC79A7", "D"),
    CEILING: Look("#56B4E9", "v"),
    RANDOM: Look("#882255", "*"),
    TABLE: Look("#8A8A1F", ">"),
}


Point = tuple[float, float, Interval | None]
"""x, y and the interval of y."""


class Series(NamedTuple):
    """A line of a figure, or a row, which has a single point."""

    name: str
    look: Look
    points: Sequence[Point]
    note: str = ""
    """Marks an arm that does not compare with the others, such as ``other trunk``."""

    def label(self, separator: str) -> str:
        short = self.name if len(self.name) <= MAX_LABEL_CHARS else f"{self.name[: MAX_LABEL_CHARS - 3]}..."
        return f"{short}{separator}({self.note})" if self.note else short

    @property
    def marker(self) -> dict[str, Any]:
        """The style of its marker; hollow with a note."""
        return {
            "color": self.look.colour,
            "marker": self.look.marker,
            "markerfacecolor": "white" if self.note else self.look.colour,
            "markeredgewidth": 1.6,
        }


class FigureFile(NamedTuple):
    """A rendered figure: the stem of its file name, a caption and the PNG bytes."""

    stem: str
    caption: str
    png: bytes

    @property
    def uri(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


ARM_FIGURES, CURVES = ("tau", "marginal_acceptance", "speedup"), ("loss", "held_out")
"""Stems of figures that the page shows together."""


def render_figures(report: Report, metrics: Sequence[Mapping[str, Any]] = ()) -> list[FigureFile]:
    """Draw every figure of a report that has data, and of the lines of a run's ``metrics.jsonl``."""
    figures = list[FigureFile]()
    for name, what, x_start in (
        ("tau", "Tokens committed per round (tau)", 0.9),
        ("speedup", "Tokens per second over those of the same trunk without drafts", 0.0),
    ):
        if series := _arm_series(report, name):
            caption = f"{what}, {INTERVALS}. 1 is plain decoding."
            figures.append(FigureFile(name, caption, _rows(series, LABELS[name], x_start)))
    if series := _arm_series(report, "marginal"):
        caption = f"Share of rounds that accepted the draft at each position (marginal acceptance), {INTERVALS}."
        ticks = [str(position + 1) for position in range(max(len(one.points) for one in series))]
        drawn = _lines(series, "position in the draft", "share of rounds", ticks, y_limits=(-0.03, 1.03))
        figures.append(FigureFile("marginal_acceptance", caption, drawn))
    depths = report.along("depth")
    contexts = report.along("context_tokens")
    by_depth = [str(one.depth) for one in depths]
    by_context = [context_words(one.context_tokens) for one in contexts]
    lines = (
        ("depth", depths, "tau", "Tau", "drafts per round", by_depth),
        ("depth_speedup", depths, "speedup", "Speed", "drafts per round", by_depth),
        ("context", contexts, "tau", "Tau", "tokens of context", by_context),
    )
    for stem, settings, name, what, x_label, ticks in lines:
        if len(settings) > 1 and (series := _setting_series(report, settings, name)):
            drawn = _lines(series, x_label, LABELS[name], ticks, plain_at=1.0 if name == "speedup" else None)
            figures.append(FigureFile(stem, f"{what} by {x_label}, {INTERVALS}.", drawn))
    return figures + _training_figures(metrics)


LABELS = {"tau": "tokens per round (tau)", "speedup": "times the speed without drafts"}
"""Labels of axes, by the figure of an arm."""


def _points(arm: ArmResult, figure: str) -> list[Point]:
    """Return a figure of an arm by its name, with its intervals: a share for each position, else a single value."""
    values = getattr(arm, figure)
    intervals = getattr(arm, f"{figure}_ci95")
    if values is None:
        return []
    if figure != "marginal":
        return [(0.0, values, intervals)]
    return [(float(k), *share) for k, share in enumerate(zip(values, intervals or [None] * len(values), strict=True))]


def _arm_series(report: Report, figure: str) -> list[Series]:
    """Return a figure of the arms that draft, at the headline setting."""
    groups = group_arms(report)
    looks = assign_looks([name for arms in groups.values() for name in arms])
    return [
        Series(name, looks[name], points, note)
        for note, arms in groups.items()
        for name, arm in arms.items()
        if arm.head and (points := _points(arm, figure))
    ]


def _setting_series(report: Report, settings: Sequence[Setting], figure: str) -> list[Series]:
    """Return one line per arm through its cells of all tasks at these settings, at x = 0, 1, ..."""
    series = []
    for arm, look in assign_looks(report.drafting).items():
        points = [
            (float(x), y, known)
            for x, cells in enumerate(map(report.at, settings))
            if arm in cells
            for _, y, known in _points(cells[arm], figure)
        ]
        if points:
            series.append(Series(arm, look, points))
    return series


def _training_figures(metrics: Sequence[Mapping[str, Any]]) -> list[FigureFile]:
    """Draw the curves of training: loss, and tau on the held-out text where it was measured."""
    # The losses of the depths, which are in metrics.jsonl, mostly lie on their sum.
    loss = "Training loss by step: the weighted sum over depths."
    tau = "Expected tau on text kept from training, by step, from teacher-forced acceptance."
    kinds = (
        ("loss", loss, "training loss", {"loss": "loss"}),
        ("held_out", tau, "tokens per round (tau)", {"held_out_tau": "greedy", "held_out_tau_sampled": "sampled"}),
    )
    return [
        FigureFile(stem, caption, _lines(drawn, "training step", label))
        for stem, caption, label, lines in kinds
        if (drawn := curves(metrics, lines))
    ]


def curves(metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Series]:
    """Return a line over the training step for each figure, named by key, that has two points or more."""
    looks = assign_looks(list(names))
    lines = []
    for key, name in names.items():
        points = [
            (float(line["step"]), float(line[key]), None)
            for line in metrics
            if isinstance(line.get(key), int | float) and math.isfinite(line[key])
        ]
        if len(points) > 1:
            lines.append(Series(name, looks[key], points))
    return lines


def _rows(series: Sequence[Series], label: str, x_start: float) -> bytes:
    """Draw a row for the point of each arm, with its interval, beside 1, which is plain decoding."""
    figure, axes = canvas(0.9 + 0.5 * len(series))
    most = 1.0
    for row, one in enumerate(series):
        ((_, value, known),) = one.points
        interval = known or (value, value)
        most = max(most, interval[1])
        axes.hlines(row, *interval, color=one.look.colour, linewidth=2)
        axes.plot([value], [row], **one.marker, linestyle="none", markersize=8)
        axes.annotate(
            f"{value:.2f}",
            (interval[1], row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
            color=INK,
        )
        if row and one.note != series[row - 1].note:
            axes.axhline(row - 0.5, color=FAINT, linewidth=1, zorder=0)
    axes.set_xlim(x_start, x_start + 1.2 * max(most - x_start, 0.1))
    axes.axvline(1.0, **PLAIN_LINE, zorder=0.5)
    # Names come from users: matplotlib must not parse a dollar sign in one as mathematics.
    axes.set_yticks(range(len(series)), [one.label("\n") for one in series], parse_math=False)
    # The first row on top.
    axes.set_ylim(len(series) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label)
    return png(figure)


def assign_looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a look for every arm: from :data:`LOOKS` for a known name, else an unused one while there are any."""
    # Grey is reserved for arms without drafts.
    spare = cycle([look for arm, look in LOOKS.items() if arm not in (*names, PLAIN)] or LOOKS.values())
    return {name: LOOKS.get(name) or next(spare) for name in names}


def canvas(height_inches: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the report's width, and its axes."""
    # `Figure` with its default Agg canvas, without pyplot, needs neither global state nor a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=11)
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)
    return figure, axes


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _lines(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    ticks: Sequence[str] = (),
    *,
    y_limits: tuple[float, float] | None = None,
    plain_at: float | None = None,
) -> bytes:
    """Draw lines over numbers, or over the labels ``ticks`` at x = 0, 1, ...; ``plain_at``: y of plain decoding."""
    figure, axes = canvas(3.3 + 0.25 * len(series))
    # About a dozen markers per line tell lines apart without hiding them. Points at the same tick stand side by side.
    every = max(1, max(len(one.points) for one in series) // 12)
    shift = 0.05 if ticks else 0.0
    drawn = []
    for index, one in enumerate(series):
        aside = shift * (index - (len(series) - 1) / 2)
        drawn += axes.plot(
            [x + aside for x, _, _ in one.points],
            [y for _, y, _ in one.points],
            **one.marker,
            linestyle=(0, (4, 2)) if one.note else "-",
            linewidth=1.8,
            markersize=7,
            markevery=every,
        )
        for x, _, interval in one.points:
            if interval is not None:
                axes.vlines(x + aside, *interval, color=one.look.colour, linewidth=1.4)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    if len(series) > 1:
        # Below the plot, one arm per line: long names fit, and the legend covers no curve.
        texts = figure.legend(
            drawn, [one.label(" ") for one in series], loc="outside lower left", frameon=False, fontsize=11
        ).get_texts()
        for text in texts:
            text.set_parse_math(False)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    if y_limits:
        axes.set_ylim(y_limits)
    if plain_at is not None:
        axes.axhline(plain_at, **PLAIN_LINE)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return png(figure)
