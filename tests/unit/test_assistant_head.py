"""An assistant as a head: teacher-forced, it drafts as in decoding, and training changes it and not its trunk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_assistant_drafter import Pair, needs_witness, pair, prompts, rounds, stock_drafts
from torch import Tensor, nn
from torch.nn.functional import embedding, kl_div, pad
from transformers import DynamicCache

from assistants import (
    HAS_ASSISTANTS,
    NUM_CENTROIDS,
    TRUNK_HIDDEN,
    VARIANTS,
    assistant_head,
    tiny_assistant,
    tiny_gemma_trunk,
)
from mtp_train.data.pack import PackedBatch, collate, one_row
from mtp_train.data.tokenize import Document
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads import assistant
from mtp_train.heads.assistant import AssistantHead
from mtp_train.heads.step import StepOutput
from mtp_train.losses.chunked import LossTerms
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.hidden_cache import CachedStates, HiddenCache
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import States, TrunkStates, isolated_hidden
from plain_decoding import hidden_after, plain_greedy
from summed_metrics import dense_metrics
from tiny import SLIDING_WINDOW, rows_on
from tolerances import assert_differs, assert_same, num_terms

pytestmark = pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
NUM_DEPTHS, ROW = 3, 40
NAMES = (*VARIANTS, "ordered")
Drafted = tuple[list[int], list[int]]
"""A text, and what is drafted after it."""


def packed(documents: Sequence[Sequence[int]], rows: Sequence[Sequence[int]] | None = None) -> PackedBatch:
    """Return documents in rows, by their numbers; each in a row of its own where none are given."""
    whole = [Document(one, [True] * len(one), str(number), "g") for number, one in enumerate(documents)]
    members = rows or [[number] for number in range(len(whole))]
    length = max(sum(len(documents[one]) for one in row) for row in members)
    return collate([one_row(whole, row, max(ROW, length)) for row in members])


def unrolled(trunk: Trunk, head: AssistantHead, batch: PackedBatch, hidden_BTE: Tensor | None = None) -> list[Tensor]:
    """Return the states of the teacher-forced rollout, by depth, on the trunk's states or on those that are given."""
    trunk.show_to(head)
    if hidden_BTE is None:
        hidden_BTE = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
    return head.unroll(
        trunk.head_input(hidden_BTE, head.convention),
        batch.tokens_BT,
        head.embedding(trunk.embed),
        num_depths=NUM_DEPTHS,
        positions_BT=batch.positions_BT,
        document_BT=batch.document_BT,
    )


@torch.no_grad()
def states_after(both: Pair, drafted: Sequence[Drafted]) -> list[Tensor]:
    """Return the states (K, A) of each draft, the texts packed by threes, each followed by its drafts."""
    documents = [text + drafts for text, drafts in drafted]
    rows = [list(range(len(documents)))[first : first + 3] for first in range(0, len(documents), 3)]
    states_KBTA = torch.stack(unrolled(both.trunk, assistant_head(both.model), packed(documents, rows)))
    found = []
    for row, members in enumerate(rows):
        end = 0
        for member in members:
            end += len(documents[member])
            # The trunk has read all of the text but its last token.
            found.append(states_KBTA[:, row, end - NUM_DEPTHS - 2])
    return found


def drafts_after(both: Pair, drafted: Sequence[Drafted]) -> list[list[int]]:
    head = assistant_head(both.model)
    return [
        [int(head.project(depth, state_A).argmax()) for depth, state_A in enumerate(states_KA, start=1)]
        for states_KA in states_after(both, drafted)
    ]


@pytest.fixture(scope="module", params=NAMES)
def drafted(request: pytest.FixtureRequest) -> tuple[Pair, list[Drafted]]:
    """Texts shorter and longer than the sliding window, and what transformers drafts after each."""
    both = pair(request.param)
    texts = prompts((2, 21, 9, 14, 5, 30, 8, 17, 10))
    assert min(map(len, texts)) < SLIDING_WINDOW < max(map(len, texts)) / 3
    return both, [(text, stock_drafts(both, text, NUM_DEPTHS)) for text in texts]


@needs_witness
def test_teacher_forced_drafts_are_those_of_transformers(drafted: tuple[Pair, list[Drafted]]) -> None:
    both, expected = drafted
    assert drafts_after(both, expected) == [drafts for _, drafts in expected]
    assert len({token for _, drafts in expected for token in drafts}) > 6


Patch = pytest.MonkeyPatch
Step = Callable[..., StepOutput]


def changed_step(patch: Patch, change: Callable[[Step, int, dict[str, Any]], StepOutput]) -> None:
    """Have each depth run through a function of the real step, the depth counted from 0, and its arguments."""
    stock, calls = AssistantHead.step, list[None]()

    def step(head: AssistantHead, *inputs: Tensor, **rest: Any) -> StepOutput:
        calls.append(None)
        return change(lambda **changes: stock(head, *inputs, **{**rest, **changes}), len(calls) - 1, rest)

    patch.setattr(AssistantHead, "step", step)


def unprojected(run: Step) -> StepOutput:
    state_BTA = run().logit_hidden_BTD
    return StepOutput(state_BTA, pad(state_BTA, (0, TRUNK_HIDDEN - state_BTA.shape[-1])))


def unscaled(trunk: Trunk, tokens_BT: Tensor) -> Tensor:
    return embedding(tokens_BT, trunk.causal_lm.get_input_embeddings().weight)


def renormed(patch: Patch, norm: nn.Module, change: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
    stock = norm.forward
    patch.setattr(norm, "forward", lambda state: change(stock, state))


TRAPS: dict[str, Callable[[Patch, Trunk], None]] = {
    "the position advances": lambda patch, trunk: changed_step(
        patch, lambda run, index, rest: run(positions_BT=rest["positions_BT"] + index)
    ),
    "the window is left out": lambda patch, trunk: patch.setattr(assistant, "widened", lambda window: None),
    "the window is the trunk's": lambda patch, trunk: patch.setattr(assistant, "widened", lambda window: window),
    "embeddings are not scaled": lambda patch, trunk: patch.setattr(Trunk, "embed", unscaled),
    "the state is not normed": lambda patch, trunk: renormed(patch, trunk.decoder.norm, lambda norm, state: state),
    "the state is normed twice": lambda patch, trunk: renormed(
        patch, trunk.decoder.norm, lambda norm, state: norm(norm(state))
    ),
    "the state is not projected": lambda patch, trunk: changed_step(patch, lambda run, *_: unprojected(run)),
}


@needs_witness
@pytest.mark.parametrize("trap", TRAPS)
def test_each_known_error_drafts_otherwise(trap: str, drafted: tuple[Pair, list[Drafted]], monkeypatch: Patch) -> None:
    both, expected = drafted
    right = states_after(both, expected)
    TRAPS[trap](monkeypatch, both.trunk)
    assert drafts_after(both, expected) != [drafts for _, drafts in expected]
    assert_differs(torch.stack(states_after(both, expected)), torch.stack(right), num_terms(both.trunk, both.model))


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_decoding(name: str, monkeypatch: Patch) -> None:
    """Also after rejected drafts, of which the decoder's cache keeps the keys."""
    seen, project = list[Tensor](), AssistantHead.project

    def noted(head: AssistantHead, depth: int, state: Tensor, shared: Any = None) -> Tensor:
        seen.append(state.detach().clone())
        return project(head, depth, state, shared)

    with monkeypatch.context() as patch:
        patch.setattr(AssistantHead, "project", noted)
        texts = rounds(name)
    decoded_RKBA = torch.stack(seen).squeeze(2).unflatten(0, (-1, NUM_DEPTHS))
    found = torch.stack(states_after(pair(name), texts))
    assert_same(found, decoded_RKBA.transpose(1, 2).flatten(0, 1), num_terms(pair(name).trunk, pair(name).model))


@torch.no_grad()
def test_documents_of_a_row_and_padding_change_nothing() -> None:
    both = pair()
    head, terms = assistant_head(both.model), num_terms(both.trunk, both.model)
    documents = prompts((13, 4, 17))
    whole = torch.stack(unrolled(both.trunk, head, packed(documents, [[0, 1, 2]])))[:, 0]
    for document, ours in zip(documents, whole.split([*map(len, documents), ROW - 34], dim=1), strict=False):
        length = len(document)
        alone = torch.stack(unrolled(both.trunk, head, packed([document])))[:, 0, :length]
        # Past the end of a document, a depth reads no token of it.
        for depth in range(1, NUM_DEPTHS + 1):
            assert_same(ours[depth - 1, : length - depth], alone[depth - 1, : length - depth], terms)
    joined = torch.stack(unrolled(both.trunk, head, packed([[*documents[0], *documents[1], *documents[2]]])))[:, 0]
    assert_differs(joined[:, 13:30], whole[:, 13:30], terms)


def fitting(trunk: Trunk) -> PackedBatch:
    """Return texts that the trunk writes, to be learned by heart."""
    return packed([prompt + plain_greedy(trunk, prompt, 12, ()) for prompt in prompts((3, 6, 2, 9))], [[0, 1], [2, 3]])


def micro_of(batch: PackedBatch, num_depths: int = NUM_DEPTHS) -> MicroBatch:
    return MicroBatch(batch, torch.full((num_depths,), 0.01))


def training(states: States, head: AssistantHead, **options: Any) -> HeadTraining:
    return HeadTraining(states, head, **{"num_depths": NUM_DEPTHS, "kind": "kl", "temperature": 1.0, **options})


def train(trunk: Trunk, head: AssistantHead, batch: PackedBatch, steps: int) -> list[float]:
    """Return the loss of every step."""
    module, losses = training(TrunkStates(trunk), head), []
    optimizer = torch.optim.AdamW([one for one in head.parameters() if one.requires_grad], lr=5e-3, weight_decay=0.0)
    for _ in range(steps):
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


@pytest.mark.parametrize("ordered", [False, True])
def test_training_lowers_the_loss_and_leaves_the_trunk(ordered: bool) -> None:
    trunk, model = tiny_gemma_trunk(vocab_size=64), tiny_assistant(vocab_size=64, ordered=ordered)
    if ordered:
        # As in releases: each centroid is the mean of its tokens' rows.
        rows = model.lm_head.weight[model.masked_embedding.token_ordering].unflatten(0, (NUM_CENTROIDS, -1))
        model.masked_embedding.centroids.weight.copy_(rows.mean(1))
    before = copy.deepcopy(trunk.state_dict()), copy.deepcopy(model.state_dict())
    head, batch = assistant_head(model), fitting(trunk)
    start = tau(trunk, head, batch)
    losses = train(trunk, head, batch, 120)
    assert losses[-1] < 0.3 * losses[0]
    assert tau(trunk, head, batch) > start + (0.4 if ordered else 1.5)
    assert all(torch.equal(value, before[0][name]) for name, value in trunk.state_dict().items())
    assert not any(parameter.grad is not None or parameter.requires_grad for parameter in trunk.parameters())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[1][name])}
    assert changed == trained_of(head)
    assert {"pre_projection.weight", "post_projection.weight", "model.norm.weight"} < changed
    assert not any("embed" in name or "lm_head" in name for name in changed)


def tuned(trunk: Trunk, places: Sequence[int]) -> Trunk:
    """Return a copy of which some layers have other keys."""
    changed, generator = copy.deepcopy(trunk), torch.Generator().manual_seed(1)
    for place in places:
        weight = changed.layers[place].self_attn.k_proj.weight
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return changed


def test_a_trunk_with_other_keys_needs_its_assistant_trained_anew() -> None:
    trunk, head = tiny_gemma_trunk(), assistant_head(tiny_assistant())
    train(trunk, head, fitting(trunk), 120)
    first = tau(trunk, head, fitting(trunk))
    # The last layers with keys of their own, which the assistant attends to.
    other = tuned(trunk, (2, 3))
    stale = tau(other, head, fitting(other))
    train(other, head, fitting(other), 120)
    assert stale < first - 1 < tau(other, head, fitting(other))


@torch.no_grad()
def test_drafts_change_with_the_trunks_keys_alone() -> None:
    trunk, head, batch = tiny_gemma_trunk(), assistant_head(tiny_assistant()), packed(prompts((20, 15)), [[0, 1]])
    trunk.show_to(head)
    other = tuned(trunk, (2, 3))
    plain_BTE, keys_BTE = (isolated_hidden(one, batch.tokens_BT, batch.document_BT) for one in (trunk, other))
    keys_BTE[..., :TRUNK_HIDDEN] = plain_BTE[..., :TRUNK_HIDDEN]
    plain, changed = (torch.stack(unrolled(trunk, head, batch, one)) for one in (plain_BTE, keys_BTE))
    assert_differs(changed, plain, num_terms(trunk, head))


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_trunk_shows_the_keys_that_its_layers_cache(name: str) -> None:
    trunk, tokens_1T = tiny_gemma_trunk(name), torch.tensor(prompts((SLIDING_WINDOW - 1,)))
    cache = DynamicCache(config=trunk.config)
    state_1TD = hidden_after(trunk, tokens_1T, cache)
    # The last layers of the first variant have none.
    with_keys = [one for one in zip(trunk.config.layer_types, cache.layers, strict=False) if one[1].keys is not None]
    last = dict(with_keys)
    keys = [getattr(last[kind], one) for kind in ("full_attention", "sliding_attention") for one in ("keys", "values")]
    ends = Ends(trunk.model, trunk.family)
    for shown in (trunk, ends):
        shown.show_to(assistant_head(tiny_assistant(name)))
    expected = torch.cat([state_1TD, *(one.transpose(1, 2).flatten(2) for one in keys)], dim=-1)
    assert_same(trunk.hidden(tokens_1T), expected, num_terms(trunk))
    assert trunk.state_width == ends.state_width == expected.shape[-1] > TRUNK_HIDDEN


def test_a_transformers_that_returns_no_keys_is_refused(monkeypatch: Patch) -> None:
    trunk = tiny_gemma_trunk("experts")
    trunk.show_to(assistant_head(tiny_assistant("experts")))
    stock = trunk.decoder.forward

    def keyless(**named: Any) -> Any:
        output = stock(**named)
        output.shared_kv_states = {}
        return output

    monkeypatch.setattr(trunk.decoder, "forward", keyless)
    with pytest.raises(UnsupportedModelError, match="returns no keys of a trunk whose layers share none"):
        trunk.hidden(torch.tensor([[1, 2]]))


def test_cached_states_train_as_the_trunks_do(tmp_path: Path) -> None:
    trunk, head = tiny_gemma_trunk(), assistant_head(tiny_assistant())
    documents = [Document(one, [True] * len(one), str(number), "g") for number, one in enumerate(prompts((20, 3, 12)))]
    whole = training(TrunkStates(trunk), head)
    cache = HiddenCache(tmp_path, documents, width=trunk.state_width, dtype=torch.float32)
    options: dict[str, Any] = {"device": torch.device("cpu"), "max_tokens": 20, "rank": 0, "world": 1}
    cache.build(TrunkStates(trunk), cache.missing(), on_shard=lambda *_: None, **options)
    states = CachedStates(Ends(trunk.model, trunk.family), cache, torch.float32)
    rows = [one_row(documents, (0, 2), ROW), one_row(documents, (1,), ROW)]
    batch, prepared, terms = collate(rows), states.prepare([rows], 0), num_terms(trunk, head)
    assert_same(prepared, isolated_hidden(trunk, batch.tokens_BT, batch.document_BT), terms)
    micro = micro_of(batch)
    found = training(states, head)(replace(micro, prepared=prepared))
    assert_same(found.total.detach(), whole(micro).total.detach(), terms)


def gradients(head: AssistantHead, num_depths: int = NUM_DEPTHS, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of one loss, by the names of parameters."""
    trunk = tiny_gemma_trunk()
    terms = training(TrunkStates(trunk), head, num_depths=num_depths, **options)(micro_of(fitting(trunk), num_depths))
    assert isinstance(terms, LossTerms)
    terms.total.backward()
    return {name: value.grad for name, value in head.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_depths", [1, NUM_DEPTHS])
def test_every_trained_parameter_gets_a_gradient(num_depths: int, compute_dtype: torch.dtype) -> None:
    """One depth recycles no state."""
    head = assistant_head(tiny_assistant())
    found = gradients(head, num_depths=num_depths, compute_dtype=compute_dtype)
    assert found.keys() == trained_of(head)
    assert all(value.isfinite().all() and value.any() for value in found.values())
    assert ("post_projection.weight" in found) == (num_depths > 1)


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, recomputed = (gradients(assistant_head(tiny_assistant()), recompute=one) for one in (False, True))
    assert all(torch.equal(value, recomputed[name]) for name, value in plain.items())


def test_the_loss_distils_the_bounded_logits_that_figures_are_of() -> None:
    """The trunk bounds its logits, and the assistant's own matrix gives logits without a bound."""
    trunk, head, batch = tiny_gemma_trunk(), assistant_head(tiny_assistant()), packed(prompts((20, 15)), [[0, 1]])
    trunk.logit_bound = 1.0
    bounded = training(TrunkStates(trunk), head)(micro_of(batch)).sum_K
    rows = rows_on(trunk, head, batch, NUM_DEPTHS)
    p_NV = trunk.project(rows.teacher_ND).softmax(-1)
    by_hand_K = torch.stack(
        [
            kl_div(head.project(depth, state_ND).log_softmax(-1), p_NV, reduction="none").sum(-1)[valid_N].sum()
            for depth, (state_ND, valid_N) in enumerate(zip(rows.student_KND, rows.valid_KN, strict=True), start=1)
        ]
    )
    assert_same(bounded, by_hand_K, num_terms(trunk, head))
    trunk.logit_bound = None
    assert_differs(training(TrunkStates(trunk), head)(micro_of(batch)).sum_K, by_hand_K, num_terms(trunk, head))


def test_logits_of_few_rows_and_of_many_are_equal() -> None:
    model = pair("ordered").model
    state_NA = torch.randn(40, model.lm_head.in_features, generator=torch.Generator().manual_seed(2))
    many_NV = assistant_head(model).project(1, state_NA)
    few_NV = torch.cat([assistant_head(model).project(1, one) for one in state_NA.split(1)])
    assert torch.equal(many_NV.isneginf(), few_NV.isneginf())
    assert_same(many_NV.nan_to_num(neginf=0.0), few_NV.nan_to_num(neginf=0.0), state_NA.shape[1])
