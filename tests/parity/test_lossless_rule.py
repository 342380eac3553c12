"""A correct decoder is lossless in every dtype, and a fault planted in it is found.

The limits follow from the rounding of the model itself, so that they hold for fp32 and bf16, for tiny trunks and for a
real one. The real one is a checkpoint directory in ``MTP_REAL_MODEL``.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import planted_faults as faults
from mtp_inference import (
    GenerationResult,
    HeadDrafting,
    NgramDrafting,
    Sampling,
    SpeculativeDecoder,
    TextCheck,
    compare,
    fault_of,
)
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.record import Contenders, RoundRecord, TextRecord
from mtp_inference.rounding import distances
from mtp_inference.rule import first_broken
from mtp_inference.sampling.chooser import DraftSampling
from mtp_train.errors import MtpError, NotLosslessError
from mtp_train.runs.refusals import check_decoder
from mtp_train.trunk.load import Trunk
from planted_faults import Fault
from scripted import RereadingDrafting
from tiny import CACHE_KINDS, chained_head, nearly_tiny, random_tokens, tiny_head, tiny_trunk

PROMPTS = random_tokens(6, 16, seed=50).tolist()
NEW_TOKENS = 32
GREEDY, WARM = Sampling(), Sampling(temperature=0.8, top_k=30, top_p=0.95, seed=3)


@functools.cache
def trunk_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Trunk:
    return tiny_trunk(name).to(dtype)


def drafting_of(name: str, kind: str, dtype: torch.dtype = torch.bfloat16) -> Drafting:
    if kind == "ngram":
        return NgramDrafting()
    if kind == "likely":
        return RereadingDrafting(nearly_tiny(name).to(dtype))
    trunk = trunk_of(name, dtype)
    return HeadDrafting((tiny_head(trunk) if kind == "head" else chained_head(trunk, 4)).to(dtype))


def decode(
    trunk: Trunk,
    drafting: Drafting | None,
    sampling: Sampling = GREEDY,
    rule: DraftSampling = "argmax",
    prompts: Sequence[Sequence[int]] = PROMPTS,
    depth: int = 3,
    max_batch: int = 16,
    new_tokens: int = NEW_TOKENS,
) -> list[GenerationResult]:
    decoder = SpeculativeDecoder(trunk, drafting, depth, (), draft_sampling=rule, max_batch=max_batch, records=True)
    return decoder.generate(prompts, new_tokens, sampling=sampling)


def checked(
    trunk: Trunk,
    drafting: Drafting,
    fault: Fault,
    sampling: Sampling = GREEDY,
    rule: DraftSampling = "argmax",
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[TextCheck]:
    """Check texts that are decoded with a fault against texts of correct plain decoding."""
    plain = decode(trunk, None, sampling, prompts=prompts)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        drafted = decode(trunk, drafting, sampling, rule, prompts=prompts)
    return compare(drafted, plain, trunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_a_correct_decoder_is_lossless(kind: str, dtype: torch.dtype) -> None:
    name = CACHE_KINDS[kind]
    trunk = trunk_of(name, dtype)
    drafting = drafting_of(name, "head", dtype)
    ways: list[tuple[Sampling, DraftSampling]] = [(GREEDY, "argmax"), (WARM, "argmax"), (WARM, "sampled")]
    for sampling, rule in ways:
        checks = checked(trunk, drafting, faults.none, sampling, rule, PROMPTS[:8])
        assert fault_of(checks) is None, (sampling, rule, checks)
        assert [one.verdict for one in checks[8:]] == ["plain"] * 8
        # The reference of an fp32 trunk is fp32: the error is that of the last bits of a logit.
        error = checks[-1].error
        assert error is not None
        assert dtype is torch.bfloat16 or error < 1e-3


LIKELY = [("qwen2", "likely"), ("qwen3_5", "likely")]


@pytest.mark.parametrize(("name", "kind"), [*LIKELY, ("qwen2", "ngram")])
@pytest.mark.parametrize(
    "fault",
    [faults.accepts_within(2.0), faults.accepts_within(1.0), faults.accepts_within(0.5), faults.commits_another(200)],
    ids=["within 2", "within 1", "within .5", "one in 200"],
)
def test_a_wrong_greedy_token_is_found_whatever_the_rounding(name: str, kind: str, fault: Fault) -> None:
    """The logits that a wrong token was chosen from are right: no tolerance of them may excuse it."""
    checks = checked(trunk_of(name), drafting_of(name, kind), fault)
    assert any(not one.follows_rule for one in checks)
    assert "own logits and drafts" in str(fault_of(checks))


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("sampled", faults.accepts_too_often),
        ("sampled", faults.draws_from_p_after_a_rejection),
        ("sampled", faults.draws_with_another_number),
        ("argmax", faults.draws_with_another_number),
        ("sampled", faults.commits_another(200)),
        ("argmax", faults.commits_another(200)),
    ],
)
def test_a_wrong_draw_is_found(rule: DraftSampling, fault: Fault) -> None:
    checks = checked(trunk_of("qwen2"), drafting_of("qwen2", "likely"), fault, WARM, rule)
    assert "own logits and drafts" in str(fault_of(checks))


WINDOW_FAULTS: list[tuple[str, str, Callable[[Trunk], Fault]]] = [
    # Attention needs no rollback, and of this family's layers one in four attends.
    ("qwen3_5", "likely", lambda trunk: faults.no_rollback),
    *(
        (name, "likely", fault)
        for name in ("qwen2", "mistral")
        for fault in (
            faults.late_positions,
            lambda trunk: faults.rollback_off_by_one,
            lambda trunk: faults.sees_one_later_token,
            lambda trunk: faults.sees_a_rejected_key,
            lambda trunk: faults.shifted_rows,
        )
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "kind", "fault_in"), WINDOW_FAULTS)
def test_a_wrong_window_is_found(name: str, kind: str, fault_in: Callable[[Trunk], Fault], dtype: torch.dtype) -> None:
    trunk = trunk_of(name, dtype)
    checks = checked(trunk, drafting_of(name, kind, dtype), fault_in(trunk))
    # The rounds did what the rule says, with wrong logits.
    assert all(one.follows_rule for one in checks)
    assert fault_of(checks) is not None, checks
    # Sampled drafts leave no text to compare with: the logits alone show it. A text that goes on at another position
    # draws other random numbers, too.
    checks = checked(trunk, drafting_of(name, kind, dtype), fault_in(trunk), WARM, "sampled")
    told = "own logits" if fault_in(trunk) is faults.rollback_off_by_one else "larger errors"
    assert told in str(fault_of(checks))


def test_keys_in_bf16_are_no_rounding_of_fp32() -> None:
    """An error as small as bf16's rounding changes few texts of an fp32 decoder, and is found in the others."""
    trunk = trunk_of("qwen3_5", torch.float32)
    checks = checked(trunk, drafting_of("qwen3_5", "head", torch.float32), faults.coarse_keys)
    unchanged = [one for one in checks if one.verdict == "identical"]
    assert len(unchanged) > len(PROMPTS) / 2
    assert "the logits of windows have larger errors" in str(fault_of(unchanged))


@pytest.mark.parametrize(
    "fault", [faults.sees_one_later_token, faults.commits_another(200)], ids=["window", "one in 200"]
)
def test_a_run_refuses_a_faulty_decoder_before_it_trains(fault: Fault) -> None:
    trunk = trunk_of("qwen2")
    console = Console(quiet=True)
    check_decoder(trunk, PROMPTS, (), 3, console)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(NotLosslessError, match="nothing was trained"):
            check_decoder(trunk, PROMPTS, (), 3, console)


def test_plain_decoding_is_checked_too() -> None:
    """A fault that plain decoding shares with windows changes no text."""
    trunk = trunk_of("qwen2")
    stock = trunk.window_hidden
    with pytest.MonkeyPatch.context() as patch:
        scale_D = 1 + 0.2 * torch.arange(trunk.config.hidden_size).sin().bfloat16()
        patch.setattr(trunk, "window_hidden", lambda *args, **given: scale_D * stock(*args, **given), raising=False)
        drafted, plain = (decode(trunk, drafting) for drafting in (drafting_of("qwen2", "head"), None))
        checks = compare(drafted, plain, trunk)
    assert {one.verdict for one in checks} <= {"identical", "near_tie", "plain"}
    assert "larger errors" in str(fault_of([one for one in checks if one.verdict == "plain"]))


# The rule by hand


def greedy_round(
    window: Sequence[int], best: Sequence[Sequence[tuple[int, float]]], kept: Sequence[int]
) -> RoundRecord:
    """Return the record of a round: the two best tokens of each row with their logits, and what it committed."""
    rows = [
        [token, *(ids for ids, _ in two), *(value for _, value in two)] for token, two in zip(window, best, strict=True)
    ]
    tokens = (*kept, *window[len(kept) :])[: len(window)]
    return RoundRecord(tokens, len(kept), len(window) - 1, np.array(rows, np.float32))


def text_record(*rounds: RoundRecord, limit: int = 3, stops: frozenset[int] = frozenset()) -> TextRecord:
    return TextRecord(prompt_ids=(1,), max_new_tokens=limit, sampling=GREEDY, stops=stops, rounds=rounds)


PREFILL = greedy_round([1], [[(4, 2.0), (5, 1.0)]], [4])
# The drafts 7 and 8: the first is the best token after 4, the second is not the best after 7.
ROUND = greedy_round([4, 7, 8], [[(7, 3.0), (8, 2.0)], [(9, 3.0), (8, 2.9)], [(2, 1.0), (3, 0.0)]], [7, 9])
TIE = greedy_round([9, 3, 3], [[(6, 1.0), (3, 1.0)], [(5, 2.0), (6, 1.0)], [(5, 2.0), (6, 1.0)]], [3, 5])


@pytest.mark.parametrize(
    ("tokens", "record", "broken"),
    [
        ((4, 7, 9), text_record(PREFILL, ROUND), None),
        ((4, 7, 8), text_record(PREFILL, ROUND), 2),
        ((5, 7, 9), text_record(PREFILL, ROUND), 0),
        # Of equal logits the first token of the vocabulary counts.
        ((4, 7, 9, 3, 5), text_record(PREFILL, ROUND, TIE, limit=5), None),
        ((4, 7, 9, 6), text_record(PREFILL, ROUND, TIE, limit=4), 3),
        # Accepted tokens after the limit or a stop are not part of the text; a text that lacks one is broken.
        ((4, 7), text_record(PREFILL, ROUND, limit=2), None),
        ((4, 7), text_record(PREFILL, ROUND, stops=frozenset([7])), None),
        ((4, 7), text_record(PREFILL, ROUND), 2),
        ((4, 7, 9), text_record(PREFILL, ROUND, limit=2), 2),
        ((4, 7, 9), text_record(PREFILL, ROUND, limit=4), 3),
        # A round that did not begin with the last token.
        ((4, 3, 5), text_record(PREFILL, TIE), 1),
    ],
)
def test_the_rule_gives_the_tokens_of_a_text(tokens: tuple[int, ...], record: TextRecord, broken: int | None) -> None:
    assert first_broken(tokens, record) == broken


def test_a_round_that_commits_too_few_tokens_is_broken_though_the_text_is_right() -> None:
    short = greedy_round([4, 7, 8], [[(7, 3.0), (8, 2.0)], [(9, 3.0), (8, 2.9)], [(2, 1.0), (3, 0.0)]], [7])
    after = greedy_round([7], [[(9, 3.0), (8, 2.0)]], [9])
    assert first_broken((4, 7, 9), text_record(PREFILL, short, after)) is not None


def test_distances_are_of_the_contenders_of_both_sides() -> None:
    own = Contenders(np.array([[5, 6], [5, 6], [1, 2]]), np.array([[3.0, 2.0], [3.0, 2.5], [4.0, -np.inf]], np.float32))
    other = Contenders(
        np.array([[6, 5], [5, 7], [1, 2]]), np.array([[2.5, 2.25], [3.0, 2.0], [4.5, -np.inf]], np.float32)
    )
    # In the second row the other's logit of 6 is at most 2.0, and that of 7 here at most 2.5.
    assert distances(own, other).tolist() == distances(other, own).tolist() == [0.75, 0.5, 0.5]


def test_many_near_ties_are_an_alarm() -> None:
    """Each difference may be rounding; so many are not."""
    few, many = (
        [TextCheck(verdict="near_tie", position=5, expected_differences=0.1) for _ in range(count)] for count in (4, 12)
    )
    calm = [TextCheck(verdict="identical", expected_differences=0.1) for _ in range(8)]
    assert fault_of([*few, *calm]) is None
    assert "12 texts part from plain decoding, where rounding makes at most 2.0 part" in str(fault_of([*many, *calm]))


def test_texts_without_records_or_of_other_requests_are_not_compared() -> None:
    trunk = trunk_of("qwen2")
    drafted, plain, warm = decode(trunk, NgramDrafting()), decode(trunk, None), decode(trunk, None, WARM)
    with pytest.raises(MtpError, match="records=True"):
        compare([replace(one, record=None) for one in drafted], plain, trunk)
    with pytest.raises(MtpError, match="result 1 has another prompt"):
        compare(drafted, warm, trunk)


# A real model

REAL_PROMPTS = (
    "Explain what a hash table is.",
    "Write a short story about a lighthouse keeper and her dog.",
    "List the planets, one in each line.",
    "Write a Python function that reads a JSON file.",
    "What is the difference between a list and a tuple in Python?",
    "Name three uses of vinegar in a kitchen.",
    "Why is the sky blue?",
    "Translate 'good morning' into French, German and Spanish.",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet.",
    "What causes tides?",
    "Write a haiku about autumn.",
    "How do I undo the last commit in git?",
    "What are prime numbers? List the first ten.",
    "Describe the water cycle.",
    "Write an email that asks for a day off.",
)
FOUND: dict[str, Callable[[Trunk], Fault]] = {
    "accepts up to 2 below the best": lambda trunk: faults.accepts_within(2.0),
    "accepts up to 1 below the best": lambda trunk: faults.accepts_within(1.0),
    "accepts up to .5 below the best": lambda trunk: faults.accepts_within(0.5),
    "commits one wrong token in 200": lambda trunk: faults.commits_another(200),
    "rollback off by one": lambda trunk: faults.rollback_off_by_one,
    "positions late by one, all layers": faults.late_positions,
    "positions late by one, every 8th layer": lambda trunk: faults.late_positions(trunk, every=8),
    "a window sees one rejected key": lambda trunk: faults.sees_a_rejected_key,
    "a window sees one later token": lambda trunk: faults.sees_one_later_token,
    "keys and values shifted by one": lambda trunk: faults.shifted_rows,
}
"""Faults that are found with sixteen texts of 64 tokens."""
MISSED: dict[str, Callable[[Trunk], Fault]] = {
    "positions late by one, the first layer": lambda trunk: faults.late_positions(trunk, every=len(trunk.layers)),
}
"""Faults that move the contenders' logits by less than rounding; in fp32 they are found."""


@dataclass(frozen=True)
class Real:
    trunk: Trunk
    prompts: list[list[int]]
    plain: list[GenerationResult]

    def decode(self, drafting: Drafting | None, depth: int = 3, max_batch: int = 8) -> list[GenerationResult]:
        return decode(self.trunk, drafting, prompts=self.prompts, depth=depth, max_batch=max_batch, new_tokens=64)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def real(request: pytest.FixtureRequest) -> Real:
    directory = Path(os.environ["MTP_REAL_MODEL"])
    decoder = SpeculativeDecoder.from_pretrained(directory, depth=0, device="cpu", dtype=request.param)
    assert decoder.tokenizer is not None
    chats = [[{"role": "user", "content": text}] for text in REAL_PROMPTS]
    prompts = [decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids for chat in chats]
    found = Real(decoder.trunk, prompts, [])
    return replace(found, plain=found.decode(None))


needs_real_model = pytest.mark.skipif(
    "MTP_REAL_MODEL" not in os.environ, reason="MTP_REAL_MODEL names no checkpoint directory"
)


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize(("depth", "max_batch"), [(1, 8), (2, 1), (5, 8), (7, 1)])
def test_a_real_model_is_lossless_at_every_depth(depth: int, max_batch: int, real: Real) -> None:
    drafted = real.decode(NgramDrafting(), depth, max_batch)
    assert fault_of(compare(drafted, real.plain, real.trunk)) is None


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize("name", ["none", *FOUND, *MISSED])
def test_a_fault_in_decoding_a_real_model_is_found(name: str, real: Real) -> None:
    """Prints a row as JSON: what was found, and at how many tokens errors were over the limits."""
    fault_in = {"none": lambda trunk: faults.none, **FOUND, **MISSED}[name]
    with pytest.MonkeyPatch.context() as patch:
        fault_in(real.trunk)(patch)
        drafted = real.decode(NgramDrafting())
    checks = compare(drafted, real.plain, real.trunk)
    fault = fault_of(checks)
    of_drafts = checks[: len(drafted)]
    row = {
        "fault": name,
        "dtype": real.trunk.dtype_name,
        "found": fault,
        "broken": sum(not one.follows_rule for one in of_drafts),
        "near_ties": sum(one.verdict == "near_tie" for one in of_drafts),
        **{key: sum(getattr(one, key) for one in of_drafts) for key in ("measured", "over_limit")},
        "rounding": checks[-1].error,
    }
    print(json.dumps(row))
    is_missed = name in MISSED and real.trunk.dtype_name == "bfloat16"
    assert (fault is None) is (name == "none" or is_missed), row
