"""Tables of a study about serving: costs of a head, break-even lengths, and the number of drafts to serve with."""

from __future__ import annotations

from mtp_train.evaluation.cells import ALL_TASKS, Advice, BreakEven
from mtp_train.report.study_grids import Grid, Row, Texts, make_grid, make_matrix
from mtp_train.report.study_slices import Slices
from mtp_train.report.study_wording import depth_words
from mtp_train.report.wording import (
    DRAFT_VOCAB_COLUMNS,
    draft_vocab_rows,
    format_bytes,
    format_number,
    format_seconds,
    format_speedup,
)


def cost_grid(slices: Slices) -> Grid | None:
    """Return memory and prefill costs of each head; None where none were measured."""
    rows = [
        Row(
            cost.arm,
            (
                format_bytes(cost.head_bytes),
                f"{format_bytes(cost.head_kv_bytes_per_token)} on {format_bytes(cost.trunk_kv_bytes_per_token)}",
                format_bytes(cost.trunk_state_bytes),
                format_number(cost.context_tokens_lost, 0),
                _prefill(cost.prefill_ratio, cost.prefill_tokens),
            ),
        )
        for cost in slices.report.costs
    ]
    columns = ("arm", "weights", "KV cache per token", "trunk's state", "context given up", "prompt speed")
    return make_grid(columns, {"": rows})


def latency_grid(slices: Slices) -> Grid | None:
    """Return the time of a whole reply by batch and length; None where it was not measured."""
    texts: Texts = {}
    for row in slices.report.latency:
        title = f"batch {row.batch:,}, prompt of {row.prompt_tokens:,} tokens"
        text = f"{format_seconds(row.seconds)} ({format_speedup(row.plain_seconds / row.seconds)})"
        texts.setdefault(title, {}).setdefault(row.arm, {})[f"{row.output_tokens:,} tokens"] = text
    lengths = sorted({row.output_tokens for row in slices.report.latency})
    return make_matrix("arm", [f"{length:,} tokens" for length in lengths], texts)


def break_even_grid(slices: Slices) -> Grid | None:
    """Return the output length from which drafts save time, at the headline's temperature; None without data."""
    at = slices.headline
    known = [row for row in slices.report.break_even if at is None or row.temperature == at.temperature]
    texts: Texts = {}
    for row in sorted(known, key=lambda row: row.prompt_tokens):
        title = f"prompt of {row.prompt_tokens:,} tokens"
        texts.setdefault(title, {}).setdefault(task_words(row.task), {})[row.arm] = _from_length(row)
    return make_matrix("task", tuple(dict.fromkeys(row.arm for row in known)), texts)


def advice_of(slices: Slices) -> list[Advice]:
    """Return the advice at the headline's temperature; all advice where nothing was decoded."""
    headline = slices.headline
    return [row for row in slices.report.advice if headline is None or row.temperature == headline.temperature]


def advice_grid(slices: Slices) -> Grid | None:
    """Return drafts to serve and reasons: over all tasks where several arms have advice, else for every task."""
    advice = advice_of(slices)
    arms = {row.arm for row in advice}
    pooled = [row for row in advice if row.task == ALL_TASKS] if len(arms) > 1 else []
    groups: dict[str, list[Row]] = {}
    for row in pooled or advice:
        drafts = str(row.depth) if row.depth else "none"
        line = Row(row.arm, (drafts, format_speedup(row.speedup), row.reason))
        groups.setdefault(task_words(row.task), []).append(line)
    return make_grid(("arm", "drafts", "speedup", "why"), groups, prose=True)


def advice_matrix(slices: Slices) -> Grid | None:
    """Return the number of drafts to serve by task and arm; None without advice."""
    advice = advice_of(slices)
    texts: dict[str, dict[str, str]] = {}
    for row in advice:
        drafts = f"{row.depth} ({format_speedup(row.speedup)})" if row.depth else "none"
        texts.setdefault(task_words(row.task), {})[row.arm] = drafts
    return make_matrix("drafts for", tuple(dict.fromkeys(row.arm for row in advice)), {"": texts})


def draft_vocab_grid(slices: Slices) -> Grid | None:
    """Return the estimates for smaller draft vocabularies; None where there are none."""
    found = slices.report.draft_vocab
    groups = {
        one.arm if len(found) > 1 else "": [Row(name, tuple(cells)) for name, *cells in draft_vocab_rows(one)]
        for one in found
    }
    return make_grid(DRAFT_VOCAB_COLUMNS, groups)


def task_words(task: str) -> str:
    """Return the display name of a task."""
    return "all tasks" if task == ALL_TASKS else task


def _prefill(ratio: float | None, tokens: int | None) -> str:
    if ratio is None:
        return "-"
    return format_speedup(ratio) + (f" at {tokens:,} tokens" if tokens else "")


def _from_length(row: BreakEven) -> str:
    if row.output_tokens is None:
        return "not shown to pay"
    length = f"from {row.output_tokens:,} tokens" if row.output_tokens else "always"
    return f"{length}, {depth_words(row.depth)}"
