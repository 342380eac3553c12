"""Draw the figures of runs and studies, as PNG bytes.

Colours are the palette of Okabe and Ito, with wine and olive of Tol's, which are safe for colour-blind readers. Every
arm also has its own marker or hatch, so that figures stay readable in black and white. matplotlib is imported where a
figure is drawn: its import is slow, and most commands draw nothing.

A figure of a study shows one slice of the grid through its headline setting.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.names import CEILING, CONTROL, GRAFT, NATIVE, PLAIN, RANDOM, RETRAINED, TABLE, VANILLA
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmResult, Cell, Report
from mtp_train.report.slices import Slices, slice_report
from mtp_train.report.tables import context_words
from mtp_train.report.wording import format_number, format_seconds, format_speedup, group_arms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, FAINT = "#222222", "#d9d9d9"
WIDTH_INCHES = 5.2
PIXELS_PER_INCH = 200
MAX_LABEL_CHARS = 26
INTERVALS = "with 95 % intervals over groups of prompts"


@dataclass(frozen=True)
class Look:
    """Colour, marker and hatch of an arm, the same in every figure."""

    colour: str
    marker: str
    hatch: str


LOOKS = {
    PLAIN: Look("#666666", "X", ""),
    NATIVE: Look("#E69F00", "P", "\\\\\\"),
    GRAFT: Look("#D55E00", "s", "///"),
    RETRAINED: Look("#0072B2", "o", ""),
    VANILLA: Look("#009E73", "^", "..."),
    CONTROL: Look("#CC79A7", "D", "xxx"),
    CEILING: Look("#56B4E9", "v", "---"),
    RANDOM: Look("#882255", "*", "ooo"),
    TABLE: Look("#8A8A1F", ">", "+++"),
}


@dataclass(frozen=True)
class Subject:
    """A line or a row of a figure; a note marks arms that do not compare with the others, such as ``other trunk``."""

    name: str
    note: str
    look: Look

    def label(self, separator: str) -> str:
        short = cut(self.name, MAX_LABEL_CHARS)
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


FIGURE_STEM = r"tau|marginal_acceptance|speedup|loss|held_out|learning_rate|depth|context|costs|tasks_\d+"
"""Pattern of the stem of every figure that a report can have."""
MAX_TASK_CHARS = 18


def render_figures(report: Report, metrics: Sequence[Mapping[str, Any]] = ()) -> list[FigureFile]:
    """Draw every figure of a report that has data, and of the lines of a run's ``metrics.jsonl``."""
    slices, drawn = slice_report(report), _drawn_arms(report)
    looks = assign_looks(slices.arms)
    figures = []
    if with_tau := [d for d in drawn if d.arm.tau is not None]:
        caption = f"Tokens committed per round (tau), {INTERVALS}. 1 is plain decoding."
        figures.append(FigureFile("tau", caption, tau_figure(with_tau)))
    if with_shares := [d for d in drawn if d.arm.marginal]:
        caption = f"Share of rounds that accepted the draft at each position (marginal acceptance), {INTERVALS}."
        figures.append(FigureFile("marginal_acceptance", caption, marginal_figure(with_shares)))
    if with_speed := [d for d in drawn if d.arm.speedup is not None]:
        caption = f"Tokens per second over those of the same trunk and decoder without drafts, {INTERVALS}."
        figures.append(FigureFile("speedup", caption, speedup_figure(with_speed)))
    figures += _heat_maps(slices)
    draws = (_depth, _context, _costs)
    figures += [figure for draw in draws if (figure := draw(slices, looks)) is not None]
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


def tau_figure(drawn: Sequence[Drawn]) -> bytes:
    figure, axes = canvas(row_height(len(drawn)))
    ends = [d.arm.tau_ci95 or (d.arm.tau or 0.0, d.arm.tau or 0.0) for d in drawn]
    for row, (d, interval) in enumerate(zip(drawn, ends, strict=True)):
        axes.plot(interval, [row, row], color=d.look.colour, linewidth=2, solid_capstyle="butt")
        axes.plot([d.arm.tau or 0.0], [row], **_marker(d), linestyle="none", markersize=8)
        write_value(axes, interval[1], row, f"{d.arm.tau:.2f}")
    axes.set_xlim(0.9, 0.9 + 1.2 * max(max(high for _, high in ends) - 0.9, 0.1))
    return _beside_plain(figure, axes, drawn, "tokens per round (tau)")


def marginal_figure(drawn: Sequence[Drawn]) -> bytes:
    series, depth = [], max(len(d.arm.marginal or ()) for d in drawn)
    for d in drawn:
        shares = d.arm.marginal or ()
        intervals = [*(d.arm.marginal_ci95 or ()), *[None] * len(shares)]
        series.append(Series(d, [(k, share, intervals[k]) for k, share in enumerate(shares)]))
    ticks = [str(position) for position in range(1, depth + 1)]
    return _lines(series, "position in the draft", "share of rounds", ticks, (-0.03, 1.03))


def speedup_figure(drawn: Sequence[Drawn]) -> bytes:
    figure, axes = canvas(row_height(len(drawn)))
    ends = [d.arm.speedup_ci95 or (d.arm.speedup or 0.0, d.arm.speedup or 0.0) for d in drawn]
    for row, (d, interval) in enumerate(zip(drawn, ends, strict=True)):
        _bar(axes, row, d.arm.speedup or 0.0, d.look)
        axes.plot(interval, [row, row], color=INK, linewidth=2, solid_capstyle="butt")
        write_value(axes, interval[1], row, f"{d.arm.speedup:.2f}x")
    axes.set_xlim(0, 1.2 * max(1.0, *(high for _, high in ends)))
    return _beside_plain(figure, axes, drawn, "times the speed without drafts")


def _beside_plain(figure: Figure, axes: Axes, drawn: Sequence[Subject], label: str) -> bytes:
    """Name rows and axis, mark 1, which is plain decoding, and render the figure."""
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    name_rows(axes, drawn)
    axes.set_xlabel(label)
    return png(figure)


def draw_series(
    figure: Figure,
    axes: Axes,
    series: Sequence[Series],
    *,
    shift: float = 0.0,
    legend: bool = True,
    every: int = 1,
) -> None:
    """Draw lines ``shift`` apart, with intervals and a marker every few points, and a legend below the plot."""
    lines = []
    for index, one in enumerate(series):
        aside = shift * (index - (len(series) - 1) / 2)
        dashes: Any = (0, (4, 2)) if one.subject.note else "-"
        lines += axes.plot(
            [x + aside for x, _, _ in one.points],
            [y for _, y, _ in one.points],
            **_marker(one.subject),
            linestyle=dashes,
            linewidth=1.8,
            markersize=7,
            markevery=every,
        )
        for x, _, interval in one.points:
            if interval is not None:
                axes.plot([x + aside, x + aside], interval, color=one.subject.look.colour, linewidth=1.4)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    if legend:
        # Below the plot, one arm per line: long names fit, and the legend covers no curve.
        labels = [one.subject.label(" ") for one in series]
        texts = figure.legend(lines, labels, loc="outside lower left", frameon=False, fontsize=11).get_texts()
        for text in texts:
            text.set_parse_math(False)


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


def _bar(axes: Axes, row: int, width: float, look: Look, left: float = 0.0) -> None:
    axes.barh(row, width, height=0.62, left=left, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0)


def canvas(height_inches: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the report's width, and its axes."""
    # `Figure` with its default Agg canvas, without pyplot, needs neither global state nor a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=11)
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)


def row_height(num_rows: int) -> float:
    return 0.9 + 0.5 * num_rows


def name_rows(axes: Axes, drawn: Sequence[Subject]) -> None:
    """Label the rows of a figure, the first on top."""
    # Names come from users: matplotlib must not parse a dollar sign in one as mathematics.
    axes.set_yticks(range(len(drawn)), [d.label("\n") for d in drawn], parse_math=False)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(drawn)):
        if drawn[row].note != drawn[row - 1].note:
            axes.axhline(row - 0.5, color=FAINT, linewidth=1, zorder=0)
    axes.spines["left"].set_visible(False)


def write_value(axes: Axes, x: float, row: int, text: str) -> None:
    axes.annotate(text, (x, row), xytext=(9, 0), textcoords="offset points", va="center", fontsize=11, color=INK)


def cut(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 3]}..."


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _heat_maps(slices: Slices) -> list[FigureFile]:
    """Draw tau over task and temperature, one heat map per arm, all on one colour scale."""
    settings = slices.main_temperatures()
    found = {key: cell.tau for key, cell in slices.cells.items()}
    tau = {
        arm: [[found.get((arm, task, setting)) for setting in settings] for task in slices.tasks] for arm in slices.arms
    }
    known = [value for rows in tau.values() for row in rows for value in row if value is not None]
    if len(slices.tasks) < 2 or not known:
        return []
    columns = [f"{s.temperature:g}" for s in settings]
    figures = []
    for number, (arm, rows) in enumerate(tau.items(), 1):
        drawn = _heat_map(arm, slices.tasks, columns, rows, (min(1.0, *known), max(known)))
        figures.append(FigureFile(f"tasks_{number}", f"Tau of {arm} by task and temperature.", drawn))
    return figures


def _heat_map(
    arm: str,
    tasks: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[float | None]],
    scale: tuple[float, float],
) -> bytes:
    figure, axes = canvas(1.2 + 0.34 * len(tasks))
    filled = [[float("nan") if value is None else value for value in row] for row in rows]
    low, high = scale
    # Only the light half of the colour map, so that dark numbers stay readable in grey and on a dark page (inverted).
    axes.imshow(filled, cmap="Blues", vmin=low, vmax=high + 0.8 * (high - low), aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            axes.text(x, y, format_number(value, 2), ha="center", va="center", fontsize=11, color=INK)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(tasks)), [cut(task, MAX_TASK_CHARS) for task in tasks], parse_math=False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xlabel("temperature")
    axes.set_title(cut(arm, 40), fontsize=11, loc="left", color=INK, parse_math=False)
    return png(figure)


def _depth(slices: Slices, looks: Mapping[str, Look]) -> FigureFile | None:
    """Draw speedup and tau over the number of drafts, and the tau at which a round breaks even."""
    at = [(float(setting.depth), setting) for setting in slices.depths()]
    tau = _series(slices, looks, at, lambda cell: (cell.tau, cell.tau_ci95))
    speedup = _series(slices, looks, at, lambda cell: (cell.speedup, cell.speedup_ci95))
    needed = _series(slices, looks, at, lambda cell: (cell.break_even_tau, None))
    if len(at) < 2 or not tau:
        return None
    figure, axes = canvas((5.6 if speedup else 3.3) + 0.25 * len(tau))
    caption = "Tau by drafts per round."
    if speedup:
        caption = "Measured speed and tau by drafts per round. Dashed: the speed without drafts."
        axes.remove()
        above, axes = figure.subplots(2, 1, sharex=True)
        draw_series(figure, above, speedup, shift=0.04, legend=False)
        above.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        above.set_ylabel("times the speed\nwithout drafts")
        style_axes(above)
        style_axes(axes)
    draw_series(figure, axes, tau, shift=0.04)
    for one in needed:
        xs, ys, _ = zip(*one.points, strict=True)
        axes.plot(xs, ys, color=one.subject.look.colour, linewidth=1.4, linestyle=":")
    if needed:
        caption += " Dotted: the tau needed to break even."
    axes.set_xticks([x for x, _ in at])
    axes.set_xlabel("drafts per round")
    axes.set_ylabel("tokens per round (tau)")
    return FigureFile("depth", caption, png(figure))


def _context(slices: Slices, looks: Mapping[str, Look]) -> FigureFile | None:
    settings = slices.contexts()
    series = _series(slices, looks, list(enumerate(settings)), lambda cell: (cell.tau, cell.tau_ci95))
    if len(settings) < 2 or not series:
        return None
    ticks = [context_words(setting.context_tokens) for setting in settings]
    caption = f"Tau by tokens of context, {INTERVALS}. Own: the unchanged prompts."
    return FigureFile("context", caption, _lines(series, "tokens of context", "tokens per round (tau)", ticks))


def _costs(slices: Slices, looks: Mapping[str, Look]) -> FigureFile | None:
    """Draw the time of a round as the time of one plain token plus the time added by drafting and verifying."""
    rows = [
        (arm, cell.round_seconds, cell.round_seconds / cell.break_even_tau)
        for arm, cell in slices.pooled().items()
        if cell.round_seconds and cell.break_even_tau
    ]
    if not rows:
        return None
    figure, axes = canvas(row_height(len(rows)) + 0.3)
    for y, (arm, seconds, plain) in enumerate(rows):
        axes.barh(y, 1000 * plain, height=0.62, color=FAINT)
        _bar(axes, y, 1000 * max(0.0, seconds - plain), looks[arm], left=1000 * plain)
        write_value(axes, 1000 * seconds, y, f"{format_seconds(seconds)}, {format_speedup(seconds / plain)}")
    axes.set_xlim(0, 1.7 * max(1000 * seconds for _, seconds, _ in rows))
    name_rows(axes, [Subject(arm, "", looks[arm]) for arm, _, _ in rows])
    axes.set_xlabel("milliseconds per round")
    caption = "Time of a round. Grey: one token of plain decoding. Colour: the time that drafting and verifying add."
    return FigureFile("costs", caption, png(figure))


def _series(
    slices: Slices,
    looks: Mapping[str, Look],
    at: Sequence[tuple[float, Setting]],
    figure_of: Callable[[Cell], tuple[float | None, Interval | None]],
) -> list[Series]:
    """Return one line per arm through its cells of all tasks at these settings."""
    series = []
    for arm, look in looks.items():
        points = []
        for x, setting in at:
            cell = slices.cells.get((arm, ALL_TASKS, setting))
            y, interval = figure_of(cell) if cell else (None, None)
            if y is not None:
                points.append((x, y, interval))
        if points:
            series.append(Series(Subject(arm, "", look), points))
    return series


def _lines(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    ticks: Sequence[str] = (),
    y_limits: tuple[float, float] | None = None,
) -> bytes:
    """Draw lines over numbers, or over the labels ``ticks`` at x = 0, 1, ..."""
    figure, axes = canvas(3.3 + 0.25 * len(series))
    # About a dozen markers per line tell lines apart without hiding them.
    every = max(1, max(len(one.points) for one in series) // 12)
    draw_series(figure, axes, series, shift=0.05 if ticks else 0.0, legend=len(series) > 1, every=every)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    if y_limits:
        axes.set_ylim(y_limits)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return png(figure)
