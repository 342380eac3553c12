"""The benchmark measures what it says: set acceptance, and transformers' own decoding with the same head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import MtpCache

from checkpoints import save_with_head
from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.bench import __main__ as bench_main
from mtp_inference.bench import clock
from mtp_inference.bench import round_costs as costs
from mtp_inference.bench.__main__ import main
from mtp_inference.bench.chain import Chain
from mtp_inference.bench.clock import time_alone
from mtp_inference.bench.measurements import (
    OurArm,
    SetAcceptance,
    TransformersArm,
    add_paired_speedups,
    compare,
    paired_ratios,
    their_head,
)
from mtp_inference.bench.subject import SHAPES, Subject, shape_subject, trained_subject
from mtp_inference.bench.texts import Prompts, read_prompts
from mtp_train.acceptance.counts import tau
from mtp_train.errors import DataError
from mtp_train.heads.step import mtp_step
from tiny import tiny_head, tiny_trunk

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times mean nothing here."""
    monkeypatch.setattr(clock, "CPU_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(costs, "REPEATS", 1)


@pytest.fixture(scope="module")
def tiny_qwen() -> Subject:
    return shape_subject("tiny-qwen", dtype=None, device=CPU, seed=0)


def run_bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the document on the last line."""
    assert main([*arguments, "--device", "cpu", "--repeats", "1"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_a_run_on_a_shape_reports_every_field_and_its_figures_agree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    document = run_bench(
        capsys,
        *("--shape", "tiny-qwen", "--depths", "0,2", "--batches", "1,2", "--prompt-lengths", "5", "--new-tokens", "12"),
        *("--accept", "1.0", "--against", "transformers", "--prefill", "--out", str(out)),
    )
    assert json.loads(out.read_text()) == document
    assert document["complete"]
    assert {"date", "hardware", "torch", "transformers", "dtype", "threads", "model"} <= document["settings"].keys()
    rows = document["decoding"]
    # Of graphs, not whether there is a GPU.
    assert document["settings"]["captured_rounds"] == 0
    assert document["settings"]["fused_kernels"] is False
    assert {row["arm"]: row["captured_rounds"] for row in rows} == {"ours": 0, "transformers": None}
    cell = [(row["arm"], row["depth"]) for row in rows if row["batch"] == 2]
    # transformers has no drafts for a recurrent family.
    assert cell == [("ours", 0), ("ours", 2), ("transformers", None)]
    assert len(rows) == 2 * len(cell)
    for row in rows:
        assert row["identical_texts"] == row["texts"] == row["batch"]
        assert row["tokens_per_second"] > 0.0
        assert row["tokens_per_second_end_to_end"] > 0.0
    for batch in (1, 2):
        plain, drafted, theirs = [row for row in rows if row["batch"] == batch]
        assert (plain["tau"], drafted["tau"], theirs["tau"]) == (1.0, 3.0, None)
        assert 0.0 < drafted["speedup_least"] <= drafted["speedup_paired"] <= drafted["speedup_most"]
        assert drafted["speedup"] == pytest.approx(drafted["tokens_per_second"] / plain["tokens_per_second"])
        assert drafted["over_transformers"] == pytest.approx(drafted["tokens_per_second"] / theirs["tokens_per_second"])
        # 11 tokens after the first: as many plain rounds, or 4 of 3 tokens.
        assert 11 / plain["tokens_per_second"] * batch == pytest.approx(11 * plain["round_ms"] / 1000)
        assert 11 / drafted["tokens_per_second"] * batch == pytest.approx(4 * drafted["round_ms"] / 1000)
    assert_rounds_agree(document["rounds"], rows)
    assert [row["ratio"] > 0.0 for row in document["prefill"]] == [True, True]


def test_a_run_that_is_broken_off_leaves_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(*_unused: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_main, "measure_rounds", broken_off)
    out = tmp_path / "bench.json"
    words = ["--shape", "tiny-qwen", "--depths", "0", "--batches", "1", "--prompt-lengths", "4", "--new-tokens", "3"]
    with pytest.raises(KeyboardInterrupt):
        main([*words, "--device", "cpu", "--repeats", "1", "--out", str(out)])
    left = json.loads(out.read_text())
    assert (left["complete"], len(left["decoding"]), left["rounds"]) == (False, 1, [])
    assert list(tmp_path.iterdir()) == [out]


def assert_rounds_agree(rounds: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    ours = [row for row in rows if row["arm"] == "ours"]
    assert [(one["batch"], one["depth"]) for one in rounds] == [(row["batch"], row["depth"]) for row in ours]
    for one, row in zip(rounds, ours, strict=True):
        pieces = sum(one[name] for name in ("verify_ms", "head_ms", "lm_head_ms", "commit_ms", "rest_ms"))
        assert pieces == pytest.approx(one["round_alone_ms"])
        read = one["bytes_read"]
        assert sum(read[name] for name in ("trunk", "head", "lm_head", "keys", "states")) == read["total"]
        assert (read["head"] > 0) == (one["depth"] > 0)
        assert one["ideal_tokens_per_second"] == pytest.approx(row["batch"] * row["tau"] / one["ideal_round_ms"] * 1000)
        assert one["roofline_share"] == pytest.approx(row["tokens_per_second"] / one["ideal_tokens_per_second"])


def test_a_trained_shape_is_compared_with_transformers_own_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_bench(
        capsys,
        *("--shape", "tiny-glm", "--train-steps", "2", "--depths", "0,3", "--batches", "1,2", "--prompt-lengths", "4"),
        *("--new-tokens", "6", "--against", "transformers"),
    )
    arms = [(row["batch"], row["arm"]) for row in document["decoding"]]
    # Their drafts are for one text at a time.
    assert [batch for batch, arm in arms if arm == "transformers use_mtp"] == [1]
    assert [row["over_transformers_mtp"] is None for row in document["decoding"] if row["depth"] == 3] == [False, True]
    assert all(row["identical_texts"] == row["texts"] for row in document["decoding"])
    assert document["prefill"] == []


def test_a_checkpoint_is_measured_with_its_own_head_on_given_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk = tiny_trunk("glm4_moe")
    path = save_with_head(trunk, tiny_head(trunk), tmp_path / "ckpt")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [token] * 6}) + "\n" for token in (1, 2, 3)))
    document = run_bench(
        capsys,
        *(str(path), "--depths", "0,1", "--batches", "1", "--prompt-lengths", "4", "--new-tokens", "3"),
        *("--prompts", str(prompts)),
    )
    assert [(row["depth"], row["texts"]) for row in document["decoding"]] == [(0, 3), (1, 3)]
    assert document["settings"]["head"] == "its own"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CKPT and --shape: neither given"),
        (["ckpt", "--shape", "9b"], "CKPT and --shape: both given"),
        (["--shape", "tiny-glm", "--head", "run"], "--head: run, with a shape"),
        (["--shape", "9b", "--train-steps", "3"], "--train-steps: 3 for 9b"),
        (["ckpt", "--train-steps", "3"], "--train-steps: 3 for ckpt"),
        (["--shape", "tiny-glm", "--train-steps", "0"], "--train-steps: 0 for tiny-glm"),
        (["--shape", "tiny-glm", "--train-steps", "1", "--dtype", "bfloat16"], "--dtype: bfloat16 with --train-steps"),
        (["--shape", "tiny-glm", "--depths", "0,8"], "depth: 8; expected 0 to 7"),
        (["--shape", "tiny-glm", "--depths", "0", "--accept", "0.5"], "--accept: 0.5 at --depths 0"),
        (["--shape", "tiny-glm", "--accept", "1.5"], "--accept: 1.5 at --depths 0,1,2,3,5,7"),
        (["--shape", "tiny-glm", "--depths", "0", "--prefill"], "--prefill: no depth above 0"),
        (["--shape", "tiny-glm", "--new-tokens", "1"], "--new-tokens: 1; expected 2 or more"),
        (["--shape", "tiny-glm", "--repeats", "0"], "--repeats: 0; expected 1 or more"),
        (["--shape", "tiny-glm", "--out", "nowhere/bench.json"], "lies in no directory"),
        (["--shape", "tiny-glm", "--out", "pyproject.toml"], "pyproject.toml exists"),
        (["nowhere"], "nowhere: not a directory"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main([*arguments, "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mtp_inference.bench: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("numbers", ["", "1,", "1;2", "-1", "1.5"])
def test_a_list_of_numbers_is_checked(numbers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--shape", "tiny-glm", f"--depths={numbers}"])
    assert leaving.value.code == 2
    assert "expected whole numbers from 0 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "no prompt; expected"),
        ("{", "not JSON"),
        ('{"prompt_ids": [512]}', "integers from 0 to 511"),
        ('{"prompt_ids": "12"}', "prompt_ids are not token ids"),
        ('{"prompt": "text"}', "a prompt that cannot be tokenized"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(line: str, message: str, tiny_qwen: Subject, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2]}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl:3: ") as refused:
        read_prompts(path, tiny_qwen)
    assert message in str(refused.value)


def test_given_prompts_are_cut_and_grouped_and_short_ones_left_out() -> None:
    given = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 1, 1]]
    prompts = Prompts(given, Chain.random_text(10), seed=0)
    assert prompts.groups(2, 3) == [[[1, 2, 3], [6, 7, 8]]]
    assert len(prompts.groups(1, 2)) == 4
    with pytest.raises(DataError, match="1 of 4 prompts have 4 tokens; expected at least 2"):
        prompts.groups(2, 4)


def test_a_chain_follows_its_successors_as_often_as_its_noise_lets_it() -> None:
    generator = torch.Generator().manual_seed(0)
    chain = Chain.one_cycle(40, 0.25, generator)
    text_BT = chain.draw(20, 100, generator)
    follows = (chain.successor_V[text_BT[:, :-1]] == text_BT[:, 1:]).float().mean()
    assert follows == pytest.approx(0.75 + 0.25 / 40, abs=0.03)
    seen, token = set(), 0
    while token not in seen:
        seen.add(token)
        token = int(chain.successor_V[token])
    assert len(seen) == 40


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_has_the_size_that_it_is_named_after(name: str) -> None:
    """The large one without memory for it: on the meta device nothing may ask what a weight holds."""
    subject = shape_subject(name, dtype=torch.bfloat16, device=torch.device("meta"), seed=0)
    billions = sum(one.numel() for one in subject.trunk.parameters()) / 1e9
    assert (round(billions, 2) == 8.95) == (name == "9b")
    assert {one.dtype for one in [*subject.trunk.parameters(), *subject.head.parameters()]} == {torch.bfloat16}


def test_a_shape_counts_whatever_its_dtype() -> None:
    subject = shape_subject("tiny-qwen", dtype=torch.bfloat16, device=CPU, seed=0)
    run = OurArm(SpeculativeDecoder(subject.trunk, None, 0, eos_ids=())).run([[3, 100], [5, 508]], 5)
    assert run.texts == [(101, 102, 103, 104, 105), (509, 510, 511, 0, 1)]


def decode_with_set_acceptance(subject: Subject, chance: float, depth: int, rows: int, new_tokens: int) -> float:
    """Return tau; the text counts, so that it is known."""
    assert subject.head is not None
    group = [[3, 50 * row] for row in range(rows)]
    num_positions = 2 + new_tokens + depth + 1
    texts = [[3, *((50 * row + ahead) % 512 for ahead in range(num_positions - 1))] for row in range(rows)]
    drafting = SetAcceptance(
        HeadDrafting(subject.head),
        chance,
        num_rows=rows,
        num_positions=num_positions,
        vocab_size=512,
        device=CPU,
        seed=1,
    )
    drafting.expect(texts)
    run = OurArm(SpeculativeDecoder(subject.trunk, drafting, depth, eos_ids=())).run(group, new_tokens)
    assert [list(text) for text in run.texts] == [text[2 : 2 + new_tokens] for text in texts]
    return tau(run.counts)


@pytest.mark.parametrize(
    ("chance", "expected", "within"),
    [(0.0, 1.0, 0.0), (0.5, 1.0 + 0.5 + 0.25 + 0.125, 0.2), (1.0, 4.0, 0.0)],
)
def test_drafts_are_right_as_often_as_asked(chance: float, expected: float, within: float, tiny_qwen: Subject) -> None:
    # Some 400 rounds; the accepted drafts of a round deviate by 1.05 at a chance of one half.
    new_tokens = 200 if chance == 0.5 else 9
    assert decode_with_set_acceptance(tiny_qwen, chance, 3, 4, new_tokens) == pytest.approx(expected, abs=within)


def test_texts_that_drafts_changed_are_counted() -> None:
    rows: list[dict[str, Any]] = [
        {"arm": "ours", "depth": depth, "tokens_per_second": speed} for depth, speed in ((0, 10.0), (2, 15.0))
    ]
    compare(rows, [[(1, 2), (3, 4)], [(1, 2), (3, 5)]], plain=0)
    assert [row["identical_texts"] for row in rows] == [2, 1]
    assert [row["speedup"] for row in rows] == [1.0, 1.5]
    compare(rows[1:], [[(1, 2)]], plain=None)
    assert (rows[1]["speedup"], rows[1]["identical_texts"]) == (None, None)


def test_paired_ratios_leave_out_what_slows_both_arms() -> None:
    # Repeats 2 and 3 run on a machine that is busy: twice and four times as slow, for both arms.
    assert paired_ratios([15.0, 8.0, 3.5], [10.0, 5.0, 2.5]) == (1.5, 1.4, 1.6)
    assert paired_ratios([6.0, 12.0], [4.0, 6.0]) == (1.75, 1.5, 2.0)
    assert paired_ratios([6.0], [4.0]) == (1.5, 1.5, 1.5)


def test_speedups_are_paired_by_repeat() -> None:
    rows: list[dict[str, Any]] = [{"depth": depth} for depth in (0, 2, None)]
    speeds = [[10.0, 5.0, 2.5], [15.0, 8.0, 3.5], [9.0, 9.0, 9.0]]
    add_paired_speedups(rows, speeds, plain=0)
    found = [(row["speedup_paired"], row["speedup_least"], row["speedup_most"]) for row in rows]
    assert found == [(1.0, 1.0, 1.0), (1.5, 1.4, 1.6), (None, None, None)]
    add_paired_speedups(rows, speeds, plain=None)
    assert {row["speedup_paired"] for row in rows} == {None}


def test_transformers_drafts_with_the_very_weights_of_our_head() -> None:
    trunk = tiny_trunk("glm4_moe")
    tokens_BT = torch.tensor([[5, 9, 2, 31, 7]])
    positions_BT = torch.arange(1, 5)[None]
    heads = [tiny_head(trunk, seed=seed) for seed in (0, 1)]
    with torch.no_grad():
        hidden_BTD = trunk.hidden(tokens_BT)[:, :-1]
        arguments: dict[str, Any] = {"depth": 1, "positions_BT": positions_BT, "mask_BTS": None, "cache": None}
        ours = [mtp_step(head, hidden_BTD, trunk.embed(tokens_BT[:, 1:]), **arguments) for head in heads]
        _, theirs_BTV, _ = their_head(trunk, heads[0])(
            input_ids=tokens_BT[:, 1:],
            last_hidden_states=hidden_BTD,
            # transformers before 5.18 does not do without.
            attention_mask=torch.ones_like(positions_BT),
            position_ids=positions_BT,
            mtp_cache=MtpCache(config=trunk.config.get_mtp_config()),
        )
        same, other = (trunk.logits(step.logit_hidden_BTD[:, -1]) for step in ours)
    torch.testing.assert_close(theirs_BTV[:, 0], same)
    assert not torch.allclose(theirs_BTV[:, 0], other, atol=1e-3)


def test_transformers_reads_the_head_that_it_is_handed_and_is_left_as_it_was() -> None:
    from transformers.modeling_layers import MtpModel

    stock = MtpModel.__dict__["from_pretrained"]
    subject = trained_subject("tiny-glm", 1, device=CPU, seed=0, on_step=lambda: None)
    assert subject.head is not None
    group = [[4, 8, 15, 16]]
    plain, drafted = (TransformersArm(subject.trunk, head) for head in (None, subject.head))
    assert plain.run(group, 6).texts == drafted.run(group, 6).texts
    assert MtpModel.__dict__["from_pretrained"] is stock
    assert not TransformersArm.can_draft(tiny_trunk("qwen3_5"))


def test_pieces_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    seconds = time_alone({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, repeats=2)
    assert order == ["a", "b"] * 3
    assert seconds.keys() == {"a", "b"}
