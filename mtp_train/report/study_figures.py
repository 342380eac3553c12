"""The figures of a study as PNG bytes: slices of the grid through its headline setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from mtp_train.acceptance import Interval
from mtp_train.report.cells import ALL_TASKS, Cell, StudyReport
from mtp_train.report.figures import (
    FAINT,
    INK,
    LOOKS,
    Drawn,
    FigureFile,
    Look,
    Series,
    Subject,
    assign_looks,
    canvas,
    cut,
    draw_series,
    marginal_figure,
    name_rows,
    png,
    row_height,
    style_axes,
    tau_figure,
    write_value,
)
from mtp_train.report.study_slices import Slices, slice_report
from mtp_train.report.wording import format_number, format_seconds, format_speedup, over_groups
from mtp_train.study.records import Setting

FIGURE_STEM = re.compile(r"(tau|marginal_acceptance|depth|context|output_position|entropy|costs|drift|tasks_\d+)")
"""Every name that a figure of a study can have."""

MAX_TASK_CHARS = 18


def render_study_figures(report: StudyReport) -> list[FigureFile]:
    """Draw every figure that has data."""
    slices = slice_report(report)
    looks = assign_looks(slices.arms)
    drawn = [Drawn(arm, "", looks[arm], cell) for arm, cell in slices.pooled().items() if cell.tau is not None]
    figures = []
    if len(drawn) > 1:
        over = over_groups(d.arm for d in drawn)
        caption = f"Tokens committed per round (tau), with 95 % intervals over {over}. 1 is plain decoding."
        figures.append(FigureFile("tau", caption, tau_figure(drawn)))
    if with_shares := [d for d in drawn if d.arm.marginal]:
        caption = "Share of rounds that accepted the draft at each position (marginal acceptance), with 95 % intervals "
        caption += f"over {over_groups(d.arm for d in with_shares)}."
        intervals = {arm: cell.marginal_ci95 or () for arm, cell in slices.pooled().items()}
        figures.append(FigureFile("marginal_acceptance", caption, marginal_figure(with_shares, intervals)))
    figures += _heat_maps(slices)
    figures += [figure for draw in (_depth, _context, _output, _entropy) if (figure := draw(slices, looks))]
    figures += [figure for draw in (_costs, _drift) if (figure := draw(slices))]
    return figures


def _heat_maps(slices: Slices) -> list[FigureFile]:
    """Draw tau over task and temperature, a map for each arm, all on one scale."""
    settings = slices.main_temperatures()
    tau = {
        arm: [[_tau(slices.cells.get((arm, task, setting))) for setting in settings] for task in slices.tasks]
        for arm in slices.arms
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
    # The light half of one hue: reads the same in grey, and inverted on a dark page, under numbers of one colour.
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
    """Draw speedup and tau over the number of drafts, tau beside the one that would pay for the round."""
    at = [(float(setting.depth), setting) for setting in slices.depths()]
    tau = _series(slices, looks, at, lambda cell: (cell.tau, cell.tau_ci95))
    speedup = _series(slices, looks, at, lambda cell: (cell.speedup, None))
    needed = _series(slices, looks, at, lambda cell: (cell.break_even_tau, None))
    if len(at) < 2 or not tau:
        return None
    figure, axes = canvas((5.6 if speedup else 3.3) + 0.25 * len(tau))
    caption = "Tau by drafts per round."
    if speedup:
        caption = "Measured speed and tau by drafts per round. On the dashed line drafts cost what they gain."
        axes.remove()
        above, axes = figure.subplots(2, 1, sharex=True)
        draw_series(figure, above, speedup, legend=False)
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
    """Draw tau over the length of the context."""
    settings = slices.contexts()
    series = _series(slices, looks, list(enumerate(settings)), lambda cell: (cell.tau, cell.tau_ci95))
    if len(settings) < 2 or not series:
        return None
    ticks = ["own" if s.context_tokens is None else f"{s.context_tokens:,}" for s in settings]
    over = over_groups(slices.pooled().values())
    caption = f"Tau by tokens of context, with 95 % intervals over {over}. Own: the prompts as they are."
    return FigureFile("context", caption, _curves(series, ticks, "tokens of context", "tokens per round (tau)"))


def _output(slices: Slices, looks: Mapping[str, Look]) -> FigureFile | None:
    """Draw tau along the output, at the headline's temperature, depth and rule."""
    headline = slices.headline
    bins = [
        row
        for row in slices.report.positions
        if headline and (row.temperature, row.depth, row.rule) == (headline.temperature, headline.depth, headline.rule)
    ]
    stretches = sorted({(row.start, row.stop) for row in bins})
    if len(stretches) < 2:
        return None
    series = [
        Series(
            Subject(arm, "", look),
            [(stretches.index((row.start, row.stop)), row.tau, row.tau_ci95) for row in bins if row.arm == arm],
        )
        for arm, look in looks.items()
        if any(row.arm == arm for row in bins)
    ]
    ticks = [f"{start:,}-\n{stop - 1:,}" for start, stop in stretches]
    over = over_groups(bins)
    caption = f"Tau of the rounds that begin in each stretch of the output, with 95 % intervals over {over}."
    return FigureFile("output_position", caption, _curves(series, ticks, "new token", "tokens per round (tau)"))


def _entropy(slices: Slices, looks: Mapping[str, Look]) -> FigureFile | None:
    """Draw overlap over target entropy, at the headline's temperature or the lowest that there is."""
    known = {row.temperature for row in slices.report.entropy}
    if not known:
        return None
    temperature = slices.headline.temperature if slices.headline else min(known)
    chosen = temperature if temperature in known else min(known)
    bins = [row for row in slices.report.entropy if row.temperature == chosen]
    starts = sorted({row.low_nats for row in bins})
    points = {
        arm: [
            (starts.index(r.low_nats), r.overlap, r.overlap_ci95)
            for r in bins
            if r.arm == arm and r.overlap is not None
        ]
        for arm in looks
    }
    series = [Series(Subject(arm, "", looks[arm]), of_arm) for arm, of_arm in points.items() if of_arm]
    if not series:
        return None
    ticks = [f"{start:g}" for start in starts]
    caption = (
        "Overlap of head and trunk at depth 1, where the trunk is equally uncertain, with 95 % intervals over "
        f"{over_groups(row for row in bins if row.groups)}. A better head lies higher."
    )
    return FigureFile("entropy", caption, _curves(series, ticks, "target entropy in nats, from", "overlap at depth 1"))


def _costs(slices: Slices) -> FigureFile | None:
    """Draw a round as the plain token that it costs and what comes on top."""
    rows = [
        (arm, cell.round_seconds, cell.round_seconds / cell.break_even_tau)
        for arm, cell in slices.pooled().items()
        if cell.round_seconds and cell.break_even_tau
    ]
    if not rows:
        return None
    figure, axes = canvas(row_height(len(rows)) + 0.3)
    looks = assign_looks(slices.arms)
    for y, (arm, seconds, plain) in enumerate(rows):
        axes.barh(y, 1000 * plain, height=0.62, color=FAINT)
        more = 1000 * max(0.0, seconds - plain)
        axes.barh(
            y,
            more,
            height=0.62,
            left=1000 * plain,
            color=looks[arm].colour,
            hatch=looks[arm].hatch,
            linewidth=0,
            edgecolor="white",
        )
        write_value(axes, 1000 * seconds, y, f"{format_seconds(seconds)}, {format_speedup(seconds / plain)}")
    axes.set_xlim(0, 1.7 * max(1000 * seconds for _, seconds, _ in rows))
    name_rows(axes, [Subject(arm, "", looks[arm]) for arm, _, _ in rows])
    axes.set_xlabel("milliseconds per round")
    caption = (
        "A round against plain decoding: grey is one token without drafts, colour what drafting and verifying add."
    )
    return FigureFile("costs", caption, png(figure))


def _drift(slices: Slices) -> FigureFile | None:
    """Draw an untouched head's tau over the tokens of fine-tuning, else over the change of the weights."""
    for label, points in (
        ("tokens fine-tuned on", [(p.tokens, p) for p in slices.report.drift if p.tokens is not None]),
        (
            "relative change of the trunk's weights",
            [(p.trunk_change, p) for p in slices.report.drift if p.trunk_change is not None],
        ),
    ):
        if len(points) > 1:
            series = Series(Subject("untouched head", "", LOOKS["graft"]), [(x, p.tau, p.tau_ci95) for x, p in points])
            over = over_groups(point for _, point in points)
            caption = f"Tau of an untouched head while its trunk is fine-tuned, with 95 % intervals over {over}."
            return FigureFile("drift", caption, _curves([series], None, label, "tokens per round (tau)"))
    return None


def _series(
    slices: Slices,
    looks: Mapping[str, Look],
    at: Sequence[tuple[float, Setting]],
    figure_of: Callable[[Cell], tuple[float | None, Interval | None]],
) -> list[Series]:
    """Return a line for each arm through its pooled cells at these settings."""
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


def _curves(series: Sequence[Series], ticks: Sequence[str] | None, x_label: str, y_label: str) -> bytes:
    """Draw lines over named places 0, 1, ..., or over numbers where there are no names."""
    figure, axes = canvas(3.3 + 0.25 * len(series))
    draw_series(figure, axes, series, shift=0.05 if ticks else 0.0, legend=len(series) > 1)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    else:
        axes.ticklabel_format(axis="x", useMathText=True, scilimits=(-3, 4))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return png(figure)


def _tau(cell: Cell | None) -> float | None:
    return cell.tau if cell else None
