"""The report's figures as PNG bytes.

Colours are Okabe and Ito's, which colour-blind readers tell apart; every arm also has a marker or a hatch of its own,
so that the figures survive a black and white printer. matplotlib is imported where a figure is drawn: it is slow, and
most commands draw none.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_train.acceptance import Interval
from mtp_train.report.schema import ArmResult, RunReport
from mtp_train.report.wording import ArmGroups, group_arms, over_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MarginalIntervals = Mapping[str, Sequence[Interval | None]]

INK, FAINT = "#222222", "#d9d9d9"
WIDTH_INCHES = 5.2
PIXELS_PER_INCH = 200
MAX_LABEL_CHARS = 26


@dataclass(frozen=True)
class Look:
    """How an arm is drawn in every figure."""

    colour: str
    marker: str
    hatch: str


LOOKS = {
    "none": Look("#666666", "X", ""),
    "native": Look("#E69F00", "P", "\\\\\\"),
    "graft": Look("#D55E00", "s", "///"),
    "retrained": Look("#0072B2", "o", ""),
    "vanilla": Look("#009E73", "^", "..."),
    "control": Look("#CC79A7", "D", "xxx"),
    "ceiling": Look("#56B4E9", "v", "---"),
}


@dataclass(frozen=True)
class Subject:
    """What a figure shows a line or a row of; an empty note marks those that compare like for like."""

    name: str
    note: str
    look: Look

    def label(self, separator: str) -> str:
        """Return the name, cut to fit, and the note."""
        short = cut(self.name, MAX_LABEL_CHARS)
        return f"{short}{separator}({self.note})" if self.note else short


@dataclass(frozen=True)
class Drawn(Subject):
    """One arm in a figure."""

    arm: ArmResult


@dataclass(frozen=True)
class Series:
    """A line in a figure: x, y and y's interval, point by point."""

    subject: Subject
    points: Sequence[tuple[float, float, Interval | None]]


@dataclass(frozen=True)
class FigureFile:
    """A rendered figure: its stem, what it shows in one sentence, and its PNG bytes."""

    stem: str
    caption: str
    png: bytes


FIGURE_STEMS = ("tau", "marginal_acceptance", "speedup")


def render_figures(report: RunReport, marginal_ci95: MarginalIntervals) -> list[FigureFile]:
    """Draw every figure that has data.

    Args:
        report: What was measured.
        marginal_ci95: By arm, the interval of the marginal acceptance at each position; arms may be missing.
    """
    drawn = _drawn_arms(group_arms(report))
    with_tau = [d for d in drawn if d.arm.tau is not None]
    with_shares = [d for d in drawn if d.arm.marginal]
    with_speed = [d for d in drawn if d.arm.speedup is not None]
    figures = []
    if with_tau:
        over = over_groups(d.arm for d in with_tau if d.arm.tau_ci95)
        caption = f"Tokens committed per round (tau), with 95 % intervals over {over}. 1 is plain decoding."
        figures.append(FigureFile(FIGURE_STEMS[0], caption, tau_figure(with_tau)))
    if with_shares:
        caption = "Share of rounds that accepted the draft at each position (marginal acceptance)."
        figures.append(FigureFile(FIGURE_STEMS[1], caption, marginal_figure(with_shares, marginal_ci95)))
    if with_speed:
        caption = "Tokens per second over those of the same trunk without drafts, in the same decoder."
        figures.append(FigureFile(FIGURE_STEMS[2], caption, speedup_figure(with_speed)))
    return figures


def tau_figure(drawn: Sequence[Drawn]) -> bytes:
    """Draw tau of each arm as a point with its interval."""
    figure, axes = canvas(row_height(len(drawn)))
    for row, d in enumerate(drawn):
        tau = d.arm.tau or 0.0
        low, high = d.arm.tau_ci95 or (tau, tau)
        axes.plot([low, high], [row, row], color=d.look.colour, linewidth=2, solid_capstyle="butt")
        axes.plot([tau], [row], **_marker(d), linestyle="none", markersize=8)
        write_value(axes, high, row, f"{tau:.2f}")
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    right = max((d.arm.tau_ci95 or (0.0, d.arm.tau or 0.0))[1] for d in drawn)
    axes.set_xlim(0.9, 0.9 + 1.2 * max(right - 0.9, 0.1))
    name_rows(axes, drawn)
    axes.set_xlabel("tokens per round (tau)")
    return png(figure)


def marginal_figure(drawn: Sequence[Drawn], marginal_ci95: MarginalIntervals) -> bytes:
    """Draw marginal acceptance over the position in the draft, one line an arm."""
    figure, axes = canvas(3.3 + 0.25 * len(drawn))
    depth = max(len(d.arm.marginal or ()) for d in drawn)
    series = []
    for d in drawn:
        shares = d.arm.marginal or ()
        intervals = [*marginal_ci95.get(d.name, ()), *[None] * len(shares)]
        series.append(Series(d, [(k, share, intervals[k - 1]) for k, share in enumerate(shares, 1)]))
    draw_series(figure, axes, series, shift=0.05)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(0.7, depth + 0.3)
    axes.set_xticks(range(1, depth + 1))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of rounds")
    return png(figure)


def speedup_figure(drawn: Sequence[Drawn]) -> bytes:
    """Draw the speedup of each arm as a bar."""
    figure, axes = canvas(row_height(len(drawn)))
    for row, d in enumerate(drawn):
        speedup = d.arm.speedup or 0.0
        axes.barh(row, speedup, height=0.62, color=d.look.colour, edgecolor="white", hatch=d.look.hatch, linewidth=0)
        write_value(axes, speedup, row, f"{speedup:.2f}x")
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.2 * max(1.0, *(d.arm.speedup or 0.0 for d in drawn)))
    name_rows(axes, drawn)
    axes.set_xlabel("times the speed without drafts")
    return png(figure)


def draw_series(
    figure: Figure, axes: Axes, series: Sequence[Series], *, shift: float = 0.0, legend: bool = True
) -> None:
    """Draw lines with their intervals, and say below the plot whose they are.

    Args:
        figure: Holds the legend.
        axes: Hold the lines.
        series: The lines.
        shift: Sideways between one line and the next, in units of x: keeps their intervals apart.
        legend: Leave it out where another plot of the figure has it.
    """
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
        )
        for x, _, interval in one.points:
            if interval is not None:
                axes.plot([x + aside, x + aside], interval, color=one.subject.look.colour, linewidth=1.4)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    if legend:
        # Below the plot, one arm a line: names of any length fit, and nothing covers a curve.
        labels = [one.subject.label(" ") for one in series]
        texts = figure.legend(lines, labels, loc="outside lower left", frameon=False, fontsize=11).get_texts()
        for text in texts:
            text.set_parse_math(False)


def assign_looks(names: Sequence[str]) -> dict[str, Look]:
    """Give every arm a look, its own where it has one; no two share one while there are enough."""
    # Grey is for arms without drafts.
    spare = [look for arm, look in LOOKS.items() if arm not in (*names, "none")] or list(LOOKS.values())
    others = [name for name in names if name not in LOOKS]
    chosen = {name: spare[index % len(spare)] for index, name in enumerate(others)}
    return {name: LOOKS.get(name) or chosen[name] for name in names}


def _drawn_arms(groups: ArmGroups) -> list[Drawn]:
    shown = ((groups.alike, ""), (groups.apart, "other trunk"), (groups.recorded, "recorded"))
    looks = assign_looks([name for arms, _ in shown for name in arms])
    return [Drawn(name, note, looks[name], arm) for arms, note in shown for name, arm in arms.items()]


def _marker(d: Subject) -> dict[str, Any]:
    """Return the line style of an arm; one that is not like for like is drawn hollow."""
    face = "white" if d.note else d.look.colour
    return {
        "color": d.look.colour,
        "marker": d.look.marker,
        "markerfacecolor": face,
        "markeredgecolor": d.look.colour,
        "markeredgewidth": 1.6,
    }


def canvas(height_inches: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the report's width, and its axes."""
    # Figure and its default Agg canvas, without pyplot: no global state, no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=PIXELS_PER_INCH, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Give axes the report's look."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=11)
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)


def row_height(num_rows: int) -> float:
    """Return the height of a figure of rows, inches."""
    return 0.9 + 0.5 * num_rows


def name_rows(axes: Axes, drawn: Sequence[Subject]) -> None:
    """Name the rows of a figure, the first on top."""
    # Names come from users: a dollar sign in one is not mathematics.
    axes.set_yticks(range(len(drawn)), [d.label("\n") for d in drawn], parse_math=False)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(drawn)):
        if drawn[row].note != drawn[row - 1].note:
            axes.axhline(row - 0.5, color=FAINT, linewidth=1, zorder=0)
    axes.spines["left"].set_visible(False)


def write_value(axes: Axes, x: float, row: int, text: str) -> None:
    """Write a figure behind its mark."""
    axes.annotate(text, (x, row), xytext=(9, 0), textcoords="offset points", va="center", fontsize=11, color=INK)


def cut(name: str, length: int) -> str:
    """Shorten a name that would not fit."""
    return name if len(name) <= length else f"{name[: length - 3]}..."


def png(figure: Figure) -> bytes:
    """Render a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
