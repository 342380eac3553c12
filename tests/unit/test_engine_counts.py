"""The wiring in which a server drafts is named from its counts of accepted drafts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engine_drafts import as_it_is, with_halves_swapped

from drafting_server import Dialect, DraftingServer
from mtp_inference.opening import OWN, open_model
from mtp_train.answers.draft_counts import SpecCounts
from mtp_train.runs.engine_counts import lengths, replayed, reproduces
from openai_server import openai_server
from runs import Capture, document, refusal

DEPTH = 3
Fault = Callable[[Any], object]


def with_norms_plus_one(head: Any) -> None:
    for name, parameter in head.named_parameters():
        if name.endswith(("embed_norm.weight", "hidden_norm.weight")):
            parameter.data += 1.0


def drafting_one_token(head: Any) -> None:
    """No draft is accepted."""
    head.project = lambda depth, state, shared: torch.zeros_like(shared(state)).index_fill(-1, torch.tensor(3), 1.0)


def server(
    fault: Fault = as_it_is, dialect: Dialect = "vllm", trunk: str = "demo:base", head: str | None = OWN
) -> DraftingServer:
    """Return a server of a trunk of the demo with a head, which a fault changed."""
    model = open_model(trunk, head)
    loaded = model.load_trunk(torch.device("cpu"), torch.float32)
    loaded.show_before_norm()
    drafting: Any = model.load_drafting(loaded)
    if drafting is not None:
        fault(drafting.head)
    return DraftingServer(loaded, drafting, DEPTH if head else 0, (), dialect)


def probe(served: DraftingServer, *words: str, capfd: Capture) -> dict[str, Any]:
    with openai_server(served.reply, owner=served.dialect, shows=served.shows) as found:
        return document(["probe", "demo:base", "--endpoint", found.url, *words], capfd)


FAULTS = {
    "as ours": as_it_is,
    "with the halves of its projection swapped": with_halves_swapped,
    "with the norms before its projection plus one": with_norms_plus_one,
}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("verdict", FAULTS)
def test_the_wiring_is_named_from_the_counts(verdict: str, dialect: Dialect, capfd: Capture) -> None:
    served = server(FAULTS[verdict], dialect)
    found = probe(served, capfd=capfd)
    assert (found["verdict"], found["equal"][verdict], found["warnings"]) == (verdict, 1.0, [])
    counted = served.results[1:]
    assert found["served"][0] == sum(one.rounds for one in counted)
    assert sum(found["served"][1:]) == sum(one.num_accepted_tokens for one in counted) > 0


def test_counts_without_accepted_drafts_are_undecided_or_of_none(capfd: Capture) -> None:
    found = probe(server(drafting_one_token), capfd=capfd)
    assert (found["served"][1:], found["verdict"] == "as ours") == ([0] * DEPTH, False)
    assert found["equal"]["as ours"] < 0.5


def test_answers_that_are_not_the_trunks_are_told(capfd: Capture) -> None:
    """The server has the fine-tune, with the head of the base."""
    found = probe(server(trunk="demo:finetune", head="demo:base"), capfd=capfd)
    assert ["are not the trunk's" in one for one in found["warnings"]] == [True]


def test_answers_that_end_with_the_servers_context_are_not_compared(capfd: Capture) -> None:
    served = server()
    served.context = 190
    found = probe(served, capfd=capfd)
    cut = sum(len(one.token_ids) < 64 for one in served.results[1:])
    assert 0 < cut < len(served.results) - 1
    assert found["answers"] <= len(served.results) - 1 - cut
    assert [one.split(" answers ")[1] for one in found["warnings"]] == [
        "end with the server's context, and are not compared."
    ]


def test_a_server_without_drafts_is_refused(capfd: Capture) -> None:
    served = server(head=None)
    with openai_server(served.reply, owner="vllm", shows=served.shows) as found:
        said = refusal(["probe", "demo:base", "--endpoint", found.url], capfd)
    assert "counts no drafts in" in said


RIGHT, WRONG, NEAR = 1.0, -1.0, 0.001
ANSWER = [[RIGHT, WRONG], [WRONG, WRONG], [RIGHT, RIGHT], [WRONG, RIGHT], [WRONG, WRONG]]
"""Margins of two drafts at five places of an answer of six tokens: rounds begin at 0, 2 and 5."""


def test_rounds_are_replayed_as_greedy_decoding_has_them() -> None:
    assert lengths(ANSWER) == [[1], [0], [2], [0], [0]]
    assert replayed(lengths(ANSWER), 2) == {(2, 2, 1)}
    near = [[NEAR, WRONG], *ANSWER[1:]]
    assert replayed(lengths(near, 0.01), 2) == {(2, 2, 1), (3, 1, 1)}
    assert replayed(lengths(near), 2) == {(2, 2, 1)}


@pytest.mark.parametrize(
    ("told", "is_reproduced"),
    [
        (SpecCounts(rounds=2, accepted_tokens=3, accepted_per_pos=(2, 1)), True),
        (SpecCounts(rounds=2, accepted_tokens=3, accepted_per_pos=(2, 1, 0)), True),
        (SpecCounts(rounds=3, accepted_tokens=2, accepted_per_pos=(1, 1)), False),
        (SpecCounts(rounds=2, accepted_tokens=3, accepted_per_pos=None), True),
        (SpecCounts(rounds=2, accepted_tokens=2, accepted_per_pos=None), False),
    ],
)
def test_counts_of_an_answer_are_reproduced_or_not(told: SpecCounts, is_reproduced: bool) -> None:
    assert reproduces(ANSWER, told) == is_reproduced


def test_drafts_behind_the_end_may_be_counted() -> None:
    """The last round begins one token before the end: engines stop it there, or count what they accepted."""
    cut = ANSWER[:3]
    assert replayed(lengths(cut), 2) == {(2, 1, 0), (2, 2, 0), (2, 2, 1)}
    assert replayed(lengths([*cut[:2], [WRONG, RIGHT]]), 2) == {(2, 1, 0)}
