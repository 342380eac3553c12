"""The conformance kit: our decoder drafts what it expects, other wirings do not, and its program can say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.run import AS_TRAINED, EXPECTED, HERE, Drafted, compare, drafted_in
from engines.ours import decode, load_subject
from mtp_train import probe_drafts
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.runs.engine_wirings import OURS

HEADS = sorted(str(path.parent.relative_to(HERE)) for path in HERE.rglob(EXPECTED))


def texts_of(head: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / head / EXPECTED).read_text())["texts"]
    return found


def rounds_of(head: str) -> list[Drafted]:
    """Return the expected rounds after every token of every text."""
    return [
        Drafted((*text["prompt_ids"], *text["token_ids"][:place]), tuple(drafts))
        for text in texts_of(head)
        for place, drafts in enumerate(text["wirings"][AS_TRAINED]["drafts"], start=1)
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_kind_of_head_is_there_and_all_of_it_is_small() -> None:
    assert {head.partition("/")[2] or "mtp" for head in HEADS} == {
        *("mtp", "eagle", "eagle3", "medusa", "dflash", "assistant")
    }
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 3e6


@pytest.mark.parametrize("head", HEADS)
def test_our_decoder_makes_the_expected_drafts(head: str) -> None:
    trunk, _, draft = head.partition("/")
    texts = texts_of(head)
    subject = load_subject(open_checkpoint(HERE / trunk), "auto", torch.float32, draft=HERE / head if draft else None)
    subject.trunk.show_to(subject.head)
    prompts = [text["prompt_ids"] for text in texts]
    num_tokens = len(texts[0]["token_ids"])
    decoded = decode(subject, prompts, depth=3, max_new_tokens=num_tokens, eos_ids=(), leading_row=False)
    rounds = drafted_in(decoded)
    said, is_right = compare(texts, rounds, None, "float32")
    assert is_right, said
    assert len(rounds) > 2 * len(texts)


def test_our_decoder_makes_the_drafts_of_a_head_that_reads_an_extra_first_row() -> None:
    texts = texts_of("qwen3_5")
    found = []
    subject = load_subject(open_checkpoint(HERE / "qwen3_5"), "llama.cpp", torch.float32)
    subject.trunk.show_to(subject.head)
    for leading_row in (True, False):
        prompts = [text["prompt_ids"] for text in texts]
        decoded = decode(subject, prompts, depth=3, max_new_tokens=20, eos_ids=(), leading_row=leading_row)
        found.append(compare(texts, drafted_in(decoded), "llama.cpp", "float32")[0])
    assert ["192 of 192 drafts llama.cpp" in said for said in found] == [True, False]
    assert ["192 of 192 drafts as trained" in said for said in found] == [False, True]


@pytest.mark.parametrize("head", [head for head in HEADS if head != "gemma4/assistant"])
def test_the_expected_drafts_are_as_ours_and_known_wrong_wirings_draft_others(head: str, tmp_path: Path) -> None:
    drafts = tmp_path / "drafts.jsonl"
    drafts.write_text("".join(json.dumps(one._asdict()) + "\n" for one in rounds_of(head)))
    trunk, _, draft = head.partition("/")
    found = probe_drafts(HERE / trunk, drafts, head=HERE / head if draft else None)
    assert found.verdict == OURS
    assert found.equal[OURS] == 1.0
    others = [share for name, share in found.equal.items() if name != OURS]
    # A wiring that changes nothing in a head is equal.
    assert sum(share < 0.98 for share in others) >= 2, found.equal


def test_the_program_counts_a_file_of_drafts(tmp_path: Path) -> None:
    drafts = tmp_path / "drafts.jsonl"
    head = "llama/eagle3"
    rounds = rounds_of(head)
    drafts.write_text("".join(json.dumps(one._asdict()) + "\n" for one in rounds))
    told = run("--heads", head, "--drafts", str(drafts), "--dtype", "float32")
    total = 3 * len(rounds)
    assert (told.returncode, told.stdout) == (0, f"{head}: {total} of {total} drafts as trained\n")


def test_one_wrong_draft_in_fp32_ends_in_an_error_and_the_command_that_names_the_wiring(tmp_path: Path) -> None:
    drafts = tmp_path / "drafts.jsonl"
    head = "llama/eagle3"
    first, *rest = rounds_of(head)
    wrong = first._replace(drafts=(first.drafts[0] + 1, *first.drafts[1:]))
    drafts.write_text("".join(json.dumps(one._asdict()) + "\n" for one in (wrong, *rest)))
    told = run("--heads", head, "--drafts", str(drafts), "--dtype", "float32", "--work", str(tmp_path / "work"))
    assert told.returncode == 1
    assert f"after {len(wrong.token_ids)} tokens {list(wrong.drafts)}, expected {list(first.drafts)}" in told.stdout
    kept = tmp_path / "work" / "llama-eagle3.jsonl"
    assert f"mtp-train probe {HERE / 'llama'} --head {HERE / head} --drafts {kept}" in told.stdout
    assert kept.read_text() == drafts.read_text()


def test_a_text_that_leaves_the_trunks_own_is_no_evidence_of_its_head() -> None:
    head = "qwen3_5"
    strayed = [one._replace(token_ids=(*one.token_ids[:-1], one.token_ids[-1] + 1)) for one in rounds_of(head)]
    assert not compare(texts_of(head), strayed, None, "float32")[1]
    assert not compare(texts_of(head), [*rounds_of(head), strayed[3]], None, "float32")[1]
    assert not compare(texts_of(head), [], None, "float32")[1]


def test_rounds_before_and_behind_the_expected_ones_do_not_count() -> None:
    head = "llama/dflash"
    rounds = rounds_of(head)
    first = texts_of(head)[0]
    last = rounds[len(rounds) // 6 - 1]
    around = [Drafted(tuple(first["prompt_ids"]), (1, 1, 1)), Drafted((*last.token_ids, *last.drafts), (1, 1, 1))]
    assert compare(texts_of(head), around + rounds, None, "float32") == compare(texts_of(head), rounds, None, "float32")


def test_an_engine_may_draft_in_its_own_known_wiring() -> None:
    head = "gemma4/assistant"
    rounds = [
        Drafted((*text["prompt_ids"], *text["token_ids"][:place]), tuple(drafts))
        for text in texts_of(head)
        for place, drafts in enumerate(text["wirings"]["vllm"]["drafts"], start=1)
    ]
    assert compare(texts_of(head), rounds, "vllm", "float32")[1]
    assert not compare(texts_of(head), rounds, "llama.cpp", "float32")[1]


def test_bf16_is_held_to_the_drafts_that_rounding_does_not_decide() -> None:
    head = "llama/eagle"
    decided = [count for text in texts_of(head) for count in text["wirings"][AS_TRAINED]["decided"]]

    def wrong_from(place: int, most: int) -> list[Drafted]:
        """Return rounds with other drafts from a place behind the decided ones on, or of these where it is negative."""
        return [
            one._replace(drafts=tuple(draft + (number >= count + place) for number, draft in enumerate(one.drafts)))
            if turn < most
            else one
            for turn, (one, count) in enumerate(zip(rounds_of(head), decided, strict=True))
        ]

    beyond = wrong_from(0, len(decided))
    within = wrong_from(-3, 3)
    assert compare(texts_of(head), beyond, None, "bfloat16") == (
        f"{sum(decided)} of {sum(decided)} drafts as trained",
        True,
    )
    assert not compare(texts_of(head), beyond, None, "float32")[1]
    assert not compare(texts_of(head), within, None, "bfloat16")[1]


@pytest.mark.slow
def test_an_installed_engine_drafts_as_expected(tmp_path: Path) -> None:
    python = os.environ.get("MTP_VLLM_PYTHON")
    if python is None:
        pytest.skip("vllm: MTP_VLLM_PYTHON names no interpreter")
    told = run("--engine", "vllm", "--python", python, "--heads", "mimo", "llama/eagle3", "--work", str(tmp_path))
    assert told.returncode == 0, told.stdout + told.stderr
