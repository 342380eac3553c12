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
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.names import CEILING, CONTROL, GRAFT, NATIVE, PLAIN, RANDOM, RETRAINED, TABLE, VANILLA
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmResult, Cell, Report
from mtp_train.report.slices import Slices, slice_report
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


@dataclass(frozen=True)
class Look:
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


@dataclass(frozen=True)
class Subject:
    """A line or a row of a figure; a note marks arms that do not compare with the others, such as ``other trunk``."""

    name: str
    note: str
    look: Look

    def label(self, separator: str) -> str:
        short = self.name if len(self.name) <= MAX_LABEL_CHARS else f"{self.name[: MAX_LABEL_CHARS - 3]}..."
        return f"{short}{separator}({self.note})" if self.note else short


@dataclass(frozen=True)
class Drawn(Subject):
    """An arm with its figures."""

    arm: ArmResult


@dataclass(frozen=True)
class Series:
    """A line of a figure; each point is x, y and the interval of y."""

    subject: Subject
    points: Sequence[tuple[float, float, Interval | None]]


@dataclass(frozen=True)
class FigureFile:
    """A rendered figure: the stem of its file name, a caption and the PNG bytes."""

    stem: str
    caption: str
    png: bytes

    @property
    def uri(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


ARM_FIGURES, CURVES = ("tau", "marginal_acceptance", "speedup"), ("loss", "held_out", "learning_rate")
"""Stems of figures that the page shows together."""


def render_figures(report: Report, metrics: Sequence[Mapping[str, Any]] = ()) -> list[FigureFile]:
    """Draw every figure of a report that has data, and of the lines of a run's ``metrics.jsonl``."""
    slices, drawn = slice_report(report), _drawn_arms(report)
    looks = assign_looks(slices.arms)
    figures = []
    if with_tau := [d for d in drawn if d.arm.tau is not None]:
        caption = f"Tokens committed per round (tau), {INTERVALS}. 1 is plain decoding."
        found = [(d, d.arm.tau or 0.0, d.arm.tau_ci95) for d in with_tau]
        figures.append(FigureFile("tau", caption, _intervals(found, "tokens per round (tau)", 0.9)))
    if with_shares := [d for d in drawn if d.arm.marginal]:
        caption = f"Share of rounds that accepted the draft at each position (marginal acceptance), {INTERVALS}."
        figures.append(FigureFile("marginal_acceptance", caption, marginal_figure(with_shares)))
    if with_speed := [d for d in drawn if d.arm.speedup is not None]:
        caption = f"Tokens per second over those of the same trunk and decoder without drafts, {INTERVALS}."
        found = [(d, d.arm.speedup or 0.0, d.arm.speedup_ci95) for d in with_speed]
        figures.append(FigureFile("speedup", caption, _intervals(found, "times the speed without drafts", 0.0)))
    for draw in (_depth, _context):
        figures += draw(slices, looks)
    return figures + _training_figures(metrics)


def _training_figures(metrics: Sequence[Mapping[str, Any]]) -> list[FigureFile]:
    """Draw the curves of training: loss, and tau on the held-out text where it was measured."""
    depths = sorted({key for line in metrics for key in line if re.fullmatch(r"loss_depth_\d+", key)})
    names = {"loss": "loss", **{key: f"depth {key.rsplit('_', 1)[1]}" for key in depths}}
    # A single depth has the curve of the loss itself.
    loss = "Training loss by step: the weighted sum over depths, and each depth's mean over its target tokens."
    tau = "Expected tau on text kept from training, by step, from teacher-forced acceptance."
    kinds = (
        ("loss", loss, "training loss", names if len(depths) > 1 else {"loss": "loss"}),
        ("held_out", tau, "tokens per round (tau)", {"held_out_tau": "greedy", "held_out_tau_sampled": "sampled"}),
        ("learning_rate", "Learning rate by step.", "learning rate", {"lr": "learning rate"}),
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
        found = [(float(line["step"]), line.get(key)) for line in metrics]
        points = [(step, float(y), None) for step, y in found if isinstance(y, int | float) and math.isfinite(y)]
        if len(points) > 1:
            lines.append(Series(Subject(name, "", looks[key]), points))
    return lines


def _intervals(found: Sequence[tuple[Subject, float, Interval | None]], label: str, x_start: float) -> bytes:
    """Draw a row for each subject with its value and interval, beside 1, which is plain decoding."""
    figure, axes = canvas(0.9 + 0.5 * len(found))
    for row, (subject, value, known) in enumerate(found):
        interval = known or (value, value)
        axes.plot(interval, [row, row], color=subject.look.colour, linewidth=2, solid_capstyle="butt")
        axes.plot([value], [row], **_marker(subject), linestyle="none", markersize=8)
        place: dict[str, Any] = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{value:.2f}", (interval[1], row), **place, fontsize=11, color=INK)
        if row and subject.note != found[row - 1][0].note:
            axes.axhline(row - 0.5, color=FAINT, linewidth=1, zorder=0)
    most = max(1.0, *((known or (value, value))[1] for _, value, known in found))
    axes.set_xlim(x_start, x_start + 1.2 * max(most - x_start, 0.1))
    axes.axvline(1.0, **PLAIN_LINE, zorder=0.5)
    # Names come from users: matplotlib must not parse a dollar sign in one as mathematics.
    axes.set_yticks(range(len(found)), [subject.label("\n") for subject, _, _ in found], parse_math=False)
    # The first row on top.
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label)
    return png(figure)


def marginal_figure(drawn: Sequence[Drawn]) -> bytes:
    series, depth = [], max(len(d.arm.marginal or ()) for d in drawn)
    for d in drawn:
        shares = d.arm.marginal or ()
        intervals = [*(d.arm.marginal_ci95 or ()), *[None] * len(shares)]
        series.append(Series(d, [(k, share, intervals[k]) for k, share in enumerate(shares)]))
    ticks = [str(position) for position in range(1, depth + 1)]
    return _lines(series, "position in the draft", "share of rounds", ticks, y_limits=(-0.03, 1.03))


def assign_looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a look for every arm: from :data:`LOOKS` for a known name, else an unused one while there are any."""
    # Grey is reserved for arms without drafts.
    spare = [look for arm, look in LOOKS.items() if arm not in (*names, PLAIN)] or list(LOOKS.values())
    others = [name for name in names if name not in LOOKS]
    chosen = {name: spare[index % len(spare)] for index, name in enumerate(others)}
    return {name: LOOKS.get(name) or chosen[name] for name in names}


def _drawn_arms(report: Report) -> list[Drawn]:
    groups = group_arms(report)
    shown = ((groups.alike, ""), (groups.apart, "other trunk"), (groups.recorded, "recorded"))
    looks = assign_looks([name for arms, _ in shown for name in arms])
    return [Drawn(name, note, looks[name], arm) for arms, note in shown for name, arm in arms.items() if arm.head]


def _marker(d: Subject) -> dict[str, Any]:
    """Return the marker style of an arm; hollow for an arm with a note, which does not compare with the others."""
    face = "white" if d.note else d.look.colour
    return {"color": d.look.colour, "marker": d.look.marker, "markerfacecolor": face, "markeredgewidth": 1.6}


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


def _depth(slices: Slices, looks: Mapping[str, Look]) -> Iterator[FigureFile]:
    """Draw tau and speedup over the number of drafts."""
    settings = slices.depths()
    if len(settings) < 2:
        return
    ticks = [str(setting.depth) for setting in settings]
    if tau := _series(slices, looks, settings, lambda cell: (cell.tau, cell.tau_ci95)):
        drawn = _lines(tau, "drafts per round", "tokens per round (tau)", ticks)
        yield FigureFile("depth", f"Tau by drafts per round, {INTERVALS}.", drawn)
    if speedup := _series(slices, looks, settings, lambda cell: (cell.speedup, cell.speedup_ci95)):
        drawn = _lines(speedup, "drafts per round", "times the speed without drafts", ticks, plain_at=1.0)
        yield FigureFile("depth_speedup", "Measured speed by drafts per round. Dashed: without drafts.", drawn)


def _context(slices: Slices, looks: Mapping[str, Look]) -> Iterator[FigureFile]:
    settings = slices.contexts()
    series = _series(slices, looks, settings, lambda cell: (cell.tau, cell.tau_ci95))
    if len(settings) < 2 or not series:
        return
    ticks = [context_words(setting.context_tokens) for setting in settings]
    caption = f"Tau by tokens of context, {INTERVALS}. Own: the unchanged prompts."
    yield FigureFile("context", caption, _lines(series, "tokens of context", "tokens per round (tau)", ticks))


def _series(
    slices: Slices,
    looks: Mapping[str, Look],
    settings: Sequence[Setting],
    figure_of: Callable[[Cell], tuple[float | None, Interval | None]],
) -> list[Series]:
    """Return one line per arm through its cells of all tasks at these settings, at x = 0, 1, ..."""
    series = []
    for arm, look in looks.items():
        points = []
        for x, setting in enumerate(settings):
            cell = slices.cells.get((arm, ALL_TASKS, setting))
            y, interval = figure_of(cell) if cell else (None, None)
            if y is not None:
                points.append((float(x), y, interval))
        if points:
            series.append(Series(Subject(arm, "", look), points))
    return series


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
    every, shift = max(1, max(len(one.points) for one in series) // 12), 0.05 if ticks else 0.0
    drawn = []
    for index, one in enumerate(series):
        aside = shift * (index - (len(series) - 1) / 2)
        drawn += axes.plot(
            [x + aside for x, _, _ in one.points],
            [y for _, y, _ in one.points],
            **_marker(one.subject),
            linestyle=(0, (4, 2)) if one.subject.note else "-",
            linewidth=1.8,
            markersize=7,
            markevery=every,
        )
        for x, _, interval in one.points:
            if interval is not None:
                axes.plot([x + aside, x + aside], interval, color=one.subject.look.colour, linewidth=1.4)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    if len(series) > 1:
        # Below the plot, one arm per line: long names fit, and the legend covers no curve.
        labels = [one.subject.label(" ") for one in series]
        texts = figure.legend(drawn, labels, loc="outside lower left", frameon=False, fontsize=11).get_texts()
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
