"""The engine decodes a grid: every arm decodes the same texts, and an interrupted study resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_inference.opening import OWN
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.arms import ArmSpec, load_arm_trunk, open_arm
from mtp_train.evaluation.decoding import LaneRecords, Stopwatch, TrunkArms, decode_prompts, measure_trunk
from mtp_train.evaluation.dense import dense_rows, replayed
from mtp_train.evaluation.grid import EvaluationGrid, grid_prompts
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.store import Store
from mtp_train.trunk.load import Trunk
from tiny import tiny_head, tiny_trunk

GRID = EvaluationGrid(
    suite="demo",
    prompts_per_task=2,
    temperatures=(0.0, 1.0),
    depths=(1, 3),
    rules=("greedy", "argmax", "sampled"),
    max_new_tokens=12,
    batch=2,
    seed=0,
)


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in (5, 9, 7)]
    return [
        Prompt(id=f"p{number}", group="", prompt_ids=tuple(one), task="ab"[number % 2])
        for number, one in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("qwen3_5")


@pytest.fixture(scope="module")
def drafting(trunk: Trunk) -> dict[str, Drafting]:
    return {"head": HeadDrafting(tiny_head(trunk)), "lookup": NgramDrafting()}


def arms_of(trunk: Trunk, drafting: dict[str, Drafting], max_new_tokens: int, **settings: Any) -> TrunkArms:
    names = dict.fromkeys(drafting, "head")
    return TrunkArms(
        **{"trunk": trunk, "name": "trunk", "drafting": drafting, "head_names": names, "eos_ids": (), "seed": 0},
        max_new_tokens=max_new_tokens,
        **settings,
    )


def block(trunk: Trunk, drafting: dict[str, Drafting], out: Path) -> LaneRecords:
    store = Store(out, {"grid": repr(GRID)})
    arms = arms_of(trunk, drafting, GRID.max_new_tokens, batch=GRID.batch, store=store)
    lanes = arms.lanes(GRID.drafted(0.0, None))
    progress = Progress(disable=True)
    found = decode_prompts(arms, {None: prompts()}, lanes, progress)
    (task,) = progress.tasks
    assert task.completed == task.total == 3 * (1 + len(lanes))
    return found


def test_rules_go_with_temperatures() -> None:
    assert {one.rule for one in GRID.drafted(0.0, None)} == {"greedy"}
    assert {one.rule for one in GRID.drafted(1.0, None)} == {"argmax", "sampled"}
    assert len(GRID.settings()) == 2 + 4
    assert GRID.headline == Setting(0.0, None, 3, "greedy")
    assert replace(GRID, depths=(5,), temperatures=(1.0,)).headline == Setting(1.0, None, 5, "sampled")


def test_a_broken_off_study_goes_on(
    trunk: Trunk, drafting: dict[str, Drafting], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = block(trunk, drafting, tmp_path / "whole")
    left = iter(range(3))
    stock = SpeculativeDecoder.stream

    def breaking(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return stock(*args)

    monkeypatch.setattr(SpeculativeDecoder, "stream", breaking)
    out = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        block(trunk, drafting, out)
    monkeypatch.undo()
    files = sorted(out.glob("measured/*/*/*.jsonl"))
    # A kill may leave half a line.
    files[0].write_bytes(files[0].read_bytes()[:-20])
    kept = {path: path.read_text(encoding="utf-8").splitlines()[0] for path in files}
    again = block(trunk, drafting, out)
    assert texts_of(again) == texts_of(whole)
    for path, line in kept.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0] == line, "what was measured is not measured again"
        assert [json.loads(line)["prompt_id"] for line in lines] == ["p0", "p1", "p2"]


def texts_of(measured: LaneRecords) -> dict[str, Any]:
    return {
        f"{arm} {setting.slug}": [(one.token_ids, one.drafted, one.accepted) for one in texts]
        for (arm, setting), texts in measured.items()
    }


def test_times_are_the_best_of_several_passes(
    trunk: Trunk, drafting: dict[str, Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = arms_of(trunk, drafting, 20)
    setting = Setting(0.0, None, 2, "greedy")
    stock = Stopwatch._decode
    taken = list[tuple[int, list[float]]]()

    def noted(self: Stopwatch, *given: Any) -> Any:
        record, seconds = stock(self, *given)
        taken.append((len(record.token_ids), list(seconds)))
        return record, seconds

    monkeypatch.setattr(Stopwatch, "_decode", noted)
    first = measure_trunk(arms, {None: prompts()}, [setting], Progress(disable=True))
    # A warm-up of each lane, then three prompts in three lanes, three times: the beginnings, but for a lookup.
    assert [tokens for tokens, _ in taken[:3]] == [16, 16, 20]
    passes = [taken[start : start + 9] for start in range(3, 30, 9)]
    assert len(taken) == 30
    # The second pass takes the lanes in reverse.
    assert [tokens for tokens, _ in passes[1][:3]] == [20, 16, 16]
    lookup = first[2].timed[setting]
    for prompt, record in enumerate(lookup):
        # Every pass decodes the same rounds, and each keeps its best time.
        times = [passes[number][3 * prompt + (0 if number % 2 else 2)][1] for number in range(3)]
        prefill, *rounds = map(min, zip(*times, strict=True))
        assert (record.seconds_prefill, record.seconds_decode) == (prefill, sum(rounds))
        assert len(rounds) == len(record.accepted)


def test_replayed_rounds_are_those_of_decoding() -> None:
    """Of a head whose drafts are accepted often, at the depth of its teacher-forced drafts and below it."""
    opened = open_arm(ArmSpec("base", "demo:base", OWN))
    trunk = load_arm_trunk(opened, torch.device("cpu"))
    head = opened.load_drafting(trunk)
    assert isinstance(head, HeadDrafting)
    suite = EvaluationGrid(suite="demo", prompts_per_task=2)
    given = grid_prompts(suite, load_tokenizer(opened.checkpoint), [None])[None]
    arms = arms_of(trunk, {"own": head}, 40)
    settings = [Setting(0.0, None, depth, "greedy") for depth in (3, 1)]
    decoded = decode_prompts(arms, {None: given}, arms.lanes(settings), Progress(disable=True))
    plain = decoded["none", settings[0].plain]
    rows = dense_rows(trunk, head, given, plain, 3, 0.0, 8192)
    for setting in settings:
        found = replayed(rows, plain, setting.depth)
        for mine, theirs in zip(found, decoded["own", setting], strict=True):
            # Decoding goes on past the end of the text, which is not known here.
            assert mine.accepted == theirs.accepted[: len(mine.accepted)]
            assert len(theirs.accepted) - len(mine.accepted) <= setting.depth + 1
            assert mine.token_ids == theirs.token_ids[: 1 + len(mine.accepted) + sum(mine.accepted)]
        assert sum(sum(one.accepted) for one in found) > 0.3 * sum(sum(one.drafted) for one in found)


@pytest.mark.parametrize("context", [None, 10])
def test_teacher_forced_metrics_of_a_context_cover_the_answers_of_longer_texts(
    context: int | None, trunk: Trunk, drafting: dict[str, Drafting]
) -> None:
    """Without a context, texts are cut at 8 tokens: 3, 1 and none of the answers' are left beside the prompts."""
    arms = arms_of(trunk, drafting, 6, seq_len_tokens=8)
    setting = Setting(0.0, context, 1, "greedy")
    _, head, _ = measure_trunk(arms, {context: prompts()}, [setting], Progress(disable=True))
    (rows,) = head.dense.values()
    assert int(rows.valid_KN[0].sum()) == (3 + 1 if context is None else 3 * 6)
