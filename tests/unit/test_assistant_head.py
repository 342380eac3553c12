"""An assistant as a head: teacher-forced, it drafts as in decoding, and training changes it and not its trunk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_assistant_drafter import Pair, needs_witness, pair, prompts, rounds, stock_drafts
from torch import Tensor, nn
from torch.nn.functional import embedding, kl_div, pad

from assistants import (
    ASSISTANT_HIDDEN,
    HAS_ASSISTANTS,
    TRUNK_HIDDEN,
    VARIANTS,
    assistant_head,
    text_config,
    tiny_assistant,
    tiny_gemma_trunk,
)
from mtp_train.data.pack import PackedBatch, collate, one_row
from mtp_train.data.tokenize import Document
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.kinds.assistant import GEMMA4
from mtp_train.heads import assistant
from mtp_train.heads.assistant import AssistantHead
from mtp_train.heads.step import StepOutput
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.hidden_cache import CachedStates, HiddenCache
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import States, TrunkStates, isolated_hidden
from plain_decoding import plain_greedy
from summed_metrics import dense_metrics
from tiny import rows_on
from tolerances import assert_differs, assert_same, num_terms

pytestmark = pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
NUM_DEPTHS, ROW = 3, 40
NAMES = (*VARIANTS, "ordered")
Drafted = tuple[list[int], list[int]]
"""A text, and what is drafted after it."""


def packed(*rows: Sequence[Sequence[int]]) -> PackedBatch:
    """Return rows of documents."""
    whole = [[Document(one, [True] * len(one), "", "g") for one in row] for row in rows]
    length = max(ROW, *(sum(map(len, row)) for row in rows))
    return collate([one_row(row, range(len(row)), length) for row in whole])


def unrolled(trunk: Trunk, head: AssistantHead, batch: PackedBatch) -> Tensor:
    """Return the states of the teacher-forced rollout, (K, B, T, A)."""
    trunk.show_to(head)
    states = head.unroll(
        trunk.head_input(isolated_hidden(trunk, batch.tokens_BT, batch.document_BT), head.convention),
        batch.tokens_BT,
        head.embedding(trunk.embed),
        num_depths=NUM_DEPTHS,
        positions_BT=batch.positions_BT,
        document_BT=batch.document_BT,
    )
    return torch.stack(states)


@torch.no_grad()
def states_after(both: Pair, drafted: Sequence[Drafted]) -> Tensor:
    """Return the states (N, K, A) of each draft, the texts packed in a row, each followed by its drafts."""
    documents = [text + drafts for text, drafts in drafted]
    states_KTA = unrolled(both.trunk, assistant_head(both.model), packed(documents))[:, 0]
    # The trunk has read all of the text but its last token.
    starts = [end - NUM_DEPTHS - 2 for end in accumulate(map(len, documents))]
    return states_KTA[:, starts].transpose(0, 1)


def drafts_after(both: Pair, drafted: Sequence[Drafted]) -> list[list[int]]:
    head = assistant_head(both.model)
    return [[int(head.project(1, state_A).argmax()) for state_A in one_KA] for one_KA in states_after(both, drafted)]


@pytest.fixture(scope="module", params=NAMES)
def drafted(request: pytest.FixtureRequest) -> tuple[Pair, list[Drafted]]:
    """Texts shorter and longer than the sliding window, and what transformers drafts after each."""
    both = pair(request.param)
    texts = prompts((2, 21, 9, 14, 5, 30, 8, 17, 10))
    return both, [(text, stock_drafts(both, text, NUM_DEPTHS)) for text in texts]


@needs_witness
def test_teacher_forced_drafts_are_those_of_transformers(drafted: tuple[Pair, list[Drafted]]) -> None:
    both, expected = drafted
    assert drafts_after(both, expected) == [drafts for _, drafts in expected]
    assert len({token for _, drafts in expected for token in drafts}) > 6


Patch = pytest.MonkeyPatch


def advance(patch: Patch) -> None:
    """Move the position on with each depth."""
    stock = AssistantHead.step
    depths = count()

    def step(head: AssistantHead, *inputs: Tensor, positions_BT: Tensor, **rest: Any) -> StepOutput:
        return stock(head, *inputs, positions_BT=positions_BT + next(depths), **rest)

    patch.setattr(AssistantHead, "step", step)


def unscaled(trunk: Trunk, tokens_BT: Tensor) -> Tensor:
    return embedding(tokens_BT, trunk.causal_lm.get_input_embeddings().weight)


def replace_forward(patch: Patch, part: nn.Module, change: Callable[[Any, Tensor], Tensor]) -> None:
    """Have a module return a function of its own forward and its input."""
    patch.setattr(part, "forward", partial(change, part.forward))


TRAPS: dict[str, Callable[[Patch, Pair], None]] = {
    "the position advances": lambda patch, both: advance(patch),
    "the window is left out": lambda patch, both: patch.setattr(assistant, "widened", lambda window: None),
    "the window is the trunk's": lambda patch, both: patch.setattr(assistant, "widened", lambda window: window),
    "embeddings are not scaled": lambda patch, both: patch.setattr(Trunk, "embed", unscaled),
    "the state is not normed": lambda patch, both: replace_forward(
        patch, both.trunk.decoder.norm, lambda norm, state: state
    ),
    "the state is normed twice": lambda patch, both: replace_forward(
        patch, both.trunk.decoder.norm, lambda norm, state: norm(norm(state))
    ),
    "the state is not projected": lambda patch, both: replace_forward(
        patch, both.model.post_projection, lambda _, state: pad(state, (0, TRUNK_HIDDEN - ASSISTANT_HIDDEN))
    ),
}


@needs_witness
@pytest.mark.parametrize("trap", TRAPS)
def test_each_known_error_drafts_otherwise(trap: str, drafted: tuple[Pair, list[Drafted]], monkeypatch: Patch) -> None:
    both, expected = drafted
    TRAPS[trap](monkeypatch, both)
    assert drafts_after(both, expected) != [drafts for _, drafts in expected]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_decoding(name: str, monkeypatch: Patch) -> None:
    """Also after rejected drafts, of which the decoder's cache keeps the keys."""
    seen = list[Tensor]()
    project = AssistantHead.project

    def noted(head: AssistantHead, depth: int, state: Tensor, shared: Any = None) -> Tensor:
        seen.append(state.detach().clone())
        return project(head, depth, state, shared)

    with monkeypatch.context() as patch:
        patch.setattr(AssistantHead, "project", noted)
        texts = rounds(name)
    decoded_RKBA = torch.stack(seen).squeeze(2).unflatten(0, (-1, NUM_DEPTHS))
    found = states_after(pair(name), texts)
    assert_same(found, decoded_RKBA.transpose(1, 2).flatten(0, 1), num_terms(pair(name).trunk, pair(name).model))


@torch.no_grad()
def test_documents_of_a_row_and_padding_change_nothing() -> None:
    both, (first, second) = pair(), prompts((13, 17))
    batches = packed([first, second]), packed([second]), packed([first + second])
    together, alone, joined = (unrolled(both.trunk, assistant_head(both.model), batch)[:, 0] for batch in batches)
    # The last starts of a document read the token after it.
    ours = together[:, 13:]
    length = 17 - NUM_DEPTHS
    assert_same(ours[:, :length], alone[:, :length], num_terms(both.trunk, both.model))
    assert_differs(joined[:, 13 : 13 + length], alone[:, :length], num_terms(both.trunk, both.model))


def fitting(trunk: Trunk) -> PackedBatch:
    """Return texts that the trunk writes, to be learned by heart."""
    documents = [prompt + plain_greedy(trunk, prompt, 12, ()) for prompt in prompts((3, 6, 2, 9))]
    return packed(documents[:2], documents[2:])


def micro_of(batch: PackedBatch, num_depths: int = NUM_DEPTHS) -> MicroBatch:
    return MicroBatch(batch, torch.full((num_depths,), 0.01))


def training(states: States, head: AssistantHead, **options: Any) -> HeadTraining:
    return HeadTraining(states, head, **{"num_depths": NUM_DEPTHS, "kind": "kl", "temperature": 1.0, **options})


def train(trunk: Trunk, head: AssistantHead, batch: PackedBatch) -> list[float]:
    """Return the loss of every step."""
    module = training(TrunkStates(trunk), head)
    losses = []
    optimizer = torch.optim.AdamW([one for one in head.parameters() if one.requires_grad], lr=5e-3, weight_decay=0.0)
    for _ in range(120):
        terms = module(micro_of(batch))
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        losses.append(terms.total.item())
    return losses


def tau(trunk: Trunk, head: AssistantHead, batch: PackedBatch) -> float:
    found = dense_metrics(trunk, head, [batch], NUM_DEPTHS).tau_greedy
    assert found is not None
    return found


def trained_of(head: AssistantHead) -> set[str]:
    return {name for name, parameter in head.model.named_parameters() if parameter.requires_grad}


def test_training_lowers_the_loss_and_leaves_the_trunk() -> None:
    trunk = tiny_gemma_trunk()
    head = assistant_head(tiny_assistant())
    before = copy.deepcopy(trunk.state_dict()), copy.deepcopy(head.model.state_dict())
    batch = fitting(trunk)
    start = tau(trunk, head, batch)
    losses = train(trunk, head, batch)
    assert losses[-1] < 0.3 * losses[0]
    assert tau(trunk, head, batch) > start + 1.5
    assert all(torch.equal(value, before[0][name]) for name, value in trunk.state_dict().items())
    changed = {name for name, value in head.model.state_dict().items() if not torch.equal(value, before[1][name])}
    assert changed == trained_of(head)


def test_keys_are_shown_in_one_order_whatever_layers_come_first() -> None:
    one, other = (GEMMA4.trunk.key_shapes(text_config(24, layers)) for layers in ("fsf", "sf"))
    assert list(one.items()) == list(other.items())


def test_a_transformers_that_returns_no_keys_is_refused(monkeypatch: Patch) -> None:
    trunk = tiny_gemma_trunk("experts")
    trunk.show_to(assistant_head(tiny_assistant("experts")))
    monkeypatch.setattr(trunk.decoder, "forward", lambda **_: SimpleNamespace(shared_kv_states=None))
    with pytest.raises(UnsupportedModelError, match="returns no keys of a trunk whose layers share none"):
        trunk.hidden(torch.tensor([[1, 2]]))


def test_cached_states_train_as_the_trunks_do(tmp_path: Path) -> None:
    trunk = tiny_gemma_trunk()
    head = assistant_head(tiny_assistant())
    documents = [Document(one, [True] * len(one), "", "g") for one in prompts((20, 3, 12))]
    whole = training(TrunkStates(trunk), head)
    cache = HiddenCache(tmp_path, documents, width=trunk.state_width, dtype=torch.float32)
    options: dict[str, Any] = {"device": torch.device("cpu"), "max_tokens": 20, "rank": 0, "world": 1}
    cache.build(TrunkStates(trunk), cache.missing(), on_shard=lambda *_: None, **options)
    # Without layers, as for a trunk whose states are all cached.
    ends = Ends(trunk.model, trunk.family)
    states = CachedStates(ends, cache, torch.float32)
    rows = [one_row(documents, (0, 2), ROW), one_row(documents, (1,), ROW)]
    batch, prepared, terms = collate(rows), states.prepare([rows], 0), num_terms(trunk, head)
    assert_same(prepared, isolated_hidden(trunk, batch.tokens_BT, batch.document_BT), terms)
    found = training(states, head)(replace(micro_of(batch), prepared=prepared))
    assert_same(found.sum_K, whole(micro_of(batch)).sum_K, terms)
    assert prepared.shape[-1] == ends.state_width == trunk.state_width


def gradients(head: AssistantHead, num_depths: int = NUM_DEPTHS, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of one loss, by the names of parameters."""
    trunk = tiny_gemma_trunk(vocab_size=64)
    module = training(TrunkStates(trunk), head, num_depths=num_depths, **options)
    # Also a trunk that is trained by somebody else gets none.
    trunk.requires_grad_(True)
    module(micro_of(fitting(trunk), num_depths)).total.backward()
    assert all(parameter.grad is None for parameter in trunk.parameters())
    return {name: value.grad for name, value in head.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_depths", [1, NUM_DEPTHS])
def test_every_trained_parameter_gets_a_gradient(num_depths: int, compute_dtype: torch.dtype) -> None:
    """One depth recycles no state. The vocabulary stays as it is."""
    head = assistant_head(tiny_assistant(ordered=True, vocab_size=64))
    found = gradients(head, num_depths=num_depths, compute_dtype=compute_dtype)
    assert found.keys() == trained_of(head)
    assert all(value.isfinite().all() and value.any() for value in found.values())
    assert not {"model.embed_tokens.weight", "masked_embedding.centroids.weight"} & found.keys()


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, recomputed = (
        gradients(assistant_head(tiny_assistant(vocab_size=64)), recompute=one) for one in (False, True)
    )
    assert all(torch.equal(value, recomputed[name]) for name, value in plain.items())


@torch.no_grad()
def test_the_loss_distils_the_bounded_logits_that_figures_are_of() -> None:
    """The trunk bounds its logits, and the assistant's own matrix gives logits without a bound."""
    trunk, head, batch = tiny_gemma_trunk(), assistant_head(tiny_assistant()), packed(prompts((20, 15)))
    trunk.logit_bound = 1.0
    rows = rows_on(trunk, head, batch, NUM_DEPTHS)
    log_q_KNV = head.project(1, rows.student_KND).log_softmax(-1)
    loss_KN = kl_div(log_q_KNV, trunk.project(rows.teacher_ND).softmax(-1), reduction="none").sum(-1)
    expected_K = (loss_KN * rows.valid_KN).sum(1)
    terms = num_terms(trunk, head)
    assert_same(training(TrunkStates(trunk), head)(micro_of(batch)).sum_K, expected_K, terms)
    trunk.logit_bound = None
    assert_differs(training(TrunkStates(trunk), head)(micro_of(batch)).sum_K, expected_K, terms)
