"""Unrolling over all starts at once is decoding from each of them.

The naive side drafts from one start: it runs the step over all rows so far, without a cache, once per depth.
Shapes: B rows, T tokens, K depths, D hidden.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from mtp_train.families import Convention
from mtp_train.families.mechanisms.key_blocks import UnrolledBlocks
from mtp_train.families.mechanisms.relative_positions import UnrolledRows, shifted
from mtp_train.heads import step as step_module
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import mtp_step, unroll
from mtp_train.trunk.load import Trunk
from redrafted import unrolled
from tiny import ALL_FAMILIES, FAMILY_NAMES, chained_head, tiny_head, tiny_trunk
from tolerances import assert_same, num_terms

NUM_TOKENS, NUM_DEPTHS = 9, 3
BLOCKS = [name for name in ("minimax_m3",) if name in ALL_FAMILIES]
"""Heads that see chosen blocks of keys only."""
RELATIVE = [name for name in ("inkling",) if name in ALL_FAMILIES]
"""Heads that see how far away keys are, with convolutions."""
POOLS = [name for name in ("glm5_next", "qwen4_exp") if name in ALL_FAMILIES]
"""Heads that see chosen pools of keys only."""
PLACED = [*BLOCKS, *RELATIVE, *POOLS]
STREAMS = "deepseek_v4"
"""A head that reads several states of the trunk side by side, and hands on as many."""
CHAINS = ["chained", *(f"chained_{name}" for name in PLACED)]
SLIDING = [f"chained_{name}" for name in ("step3p7",) if name in ALL_FAMILIES]
DRAFTS_ONLY = {f"drafts_{name}": name for name in (*CHAINS, *SLIDING)}
"""Chains whose modules all read the text as the first one does."""
TOLERANCE = {"atol": 1e-5, "rtol": 0}
FIRST_ROW_EMBEDDING = Convention(recycle="after_final_norm", zero_first_embedding=True)
BEFORE_NORM = Convention(recycle="before_final_norm", zero_first_embedding=False)


def models(name: str) -> tuple[Trunk, MtpHead]:
    """Return a tiny family's trunk and head; ``chained`` ones have three modules, one a depth."""
    chain = DRAFTS_ONLY.get(name, name)
    if not chain.startswith("chained"):
        trunk = tiny_trunk(name)
        return trunk, tiny_head(trunk, num_modules=1)
    trunk = tiny_trunk("glm4_moe" if chain == "chained" else chain.removeprefix("chained_"))
    return trunk, chained_head(trunk, NUM_DEPTHS, drafts_only=name in DRAFTS_ONLY)


def random_tokens() -> Tensor:
    return torch.randint(67, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(7))


def one_document(trunk: Trunk, head: MtpHead, tokens_1T: Tensor, num_depths: int = NUM_DEPTHS) -> list[Tensor]:
    hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
    return unrolled(head, hidden_1TD, tokens_1T, head.embedding(trunk.embed), num_depths)


def step_alone(
    trunk: Trunk, head: MtpHead, hidden_1SD: Tensor, tokens_1S: Tensor, depth: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Run one depth over rows from position ``first`` on, without a cache; return its two states, (S, D) each."""
    num_rows = hidden_1SD.shape[1]
    window = head.sliding_window(depth) or num_rows
    step = mtp_step(
        head,
        hidden_1SD,
        trunk.embed(tokens_1S),
        depth=depth,
        positions_BT=torch.arange(first, first + num_rows)[None],
        mask_BTS=torch.ones(1, num_rows, num_rows, dtype=torch.bool).tril().triu(1 - window),
        cache=None,
    )
    return step.logit_hidden_BTD[0], step.recycled_BTD[0]


def draft_recursive(trunk: Trunk, head: MtpHead, tokens_1T: Tensor, start: int) -> list[Tensor]:
    """Draft from one start: true rows up to it, then one recycled row a depth; module k reads them all anew."""
    hidden_1SD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)[:, : start + 1]
    states = []
    for depth in range(1, NUM_DEPTHS + 1):
        read_1S = tokens_1T[:, 1 : hidden_1SD.shape[1] + 1]
        logit_SD, recycled_SD = step_alone(trunk, head, hidden_1SD, read_1S, depth)
        states.append(logit_SD[-1])
        hidden_1SD = torch.cat([hidden_1SD, recycled_SD[None, -1:]], dim=1)
    return states


def draft_chained(trunk: Trunk, head: MtpHead, tokens_1T: Tensor, start: int, num_depths: int) -> list[Tensor]:
    """Draft from one start: module k over its own rows, fed by module k-1 at the same rows."""
    hidden_1SD = trunk.hidden(tokens_1T)[:, : start + 1]
    states = []
    for depth in range(1, num_depths + 1):
        read_1S = tokens_1T[:, depth : start + depth + 1]
        logit_SD, recycled_SD = step_alone(trunk, head, hidden_1SD, read_1S, depth, first=depth - 1)
        states.append(logit_SD[-1])
        hidden_1SD = recycled_SD[None]
    return states


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *PLACED, STREAMS, *DRAFTS_ONLY])
@torch.inference_mode()
def test_unroll_drafts_from_every_start_as_decoding_does(name: str) -> None:
    trunk, head = models(name)
    tokens_1T = random_tokens()
    states = one_document(trunk, head, tokens_1T)
    assert len(states) == NUM_DEPTHS
    for start in range(NUM_TOKENS - NUM_DEPTHS):
        found = [state_1TD[0, start] for state_1TD in states]
        torch.testing.assert_close(found, draft_recursive(trunk, head, tokens_1T, start), **TOLERANCE)


@pytest.mark.parametrize("name", DRAFTS_ONLY)
@torch.inference_mode()
def test_where_drafts_alone_chain_later_modules_say_other_things(name: str) -> None:
    """Else the test above could not tell who chains."""
    trunk, head = models(name)
    tokens_1T = random_tokens()
    states = one_document(trunk, head, tokens_1T)
    chained = one_document(trunk, models(DRAFTS_ONLY[name])[1], tokens_1T)
    assert torch.equal(states[0], chained[0])
    for depth in (1, 2):
        assert (states[depth] - chained[depth])[0, : NUM_TOKENS - NUM_DEPTHS].abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("name", CHAINS)
@torch.inference_mode()
def test_a_chain_of_modules_drafts_from_every_start_as_decoding_does(name: str) -> None:
    trunk, head = models(name)
    tokens_1T = random_tokens()
    states = one_document(trunk, head, tokens_1T, num_depths=2)
    for start in range(NUM_TOKENS - 2):
        found = [state_1TD[0, start] for state_1TD in states]
        torch.testing.assert_close(found, draft_chained(trunk, head, tokens_1T, start, 2), **TOLERANCE)


@pytest.mark.parametrize("family_name", [*FAMILY_NAMES, STREAMS])
@torch.inference_mode()
def test_a_recursive_head_is_not_a_chain_of_one_module(family_name: str) -> None:
    """Here the two ways of seeing must differ from depth 2 on, or the tests above could not tell them apart."""
    trunk, head = models(family_name)
    tokens_1T = random_tokens()
    states = one_document(trunk, head, tokens_1T)
    chained = draft_chained(trunk, head, tokens_1T, 4, NUM_DEPTHS)
    torch.testing.assert_close(states[0][0, 4], chained[0], **TOLERANCE)
    for depth in (1, 2):
        assert (states[depth][0, 4] - chained[depth]).abs().max() > 1e-2


def distances_by_place(mask_BTS: Tensor, depth: int) -> Tensor:
    rows_T = torch.arange(mask_BTS.shape[1])
    keys_S = torch.arange(mask_BTS.shape[2])
    return torch.where(mask_BTS, (rows_T[:, None] + keys_S[-1] - keys_S).clamp(min=0), -1)


@pytest.mark.parametrize(
    ("family_name", "spoilt"),
    [(name, spoilt) for name in RELATIVE for spoilt in ("distances", "convolutions")]
    + [(name, "pools") for name in POOLS]
    + [(name, "blocks") for name in BLOCKS],
)
@torch.inference_mode()
def test_distances_convolutions_pools_and_blocks_go_by_position(
    family_name: str, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All by place in the unroll must be wrong, or the test above proves nothing of them."""
    if spoilt == "distances":
        monkeypatch.setattr(step_module, "unroll_distances", distances_by_place)
    elif spoilt == "blocks":
        append = UnrolledBlocks.update_positions
        monkeypatch.setattr(
            UnrolledBlocks,
            "update_positions",
            lambda layer, new_BT: torch.arange(append(layer, new_BT).shape[1]).clamp(max=NUM_TOKENS)[None],
        )
    else:
        monkeypatch.setattr(
            UnrolledRows, "taps", lambda _, inputs, number, width: [shifted(inputs, back) for back in range(width)]
        )
    trunk, head = models(family_name)
    tokens_1T = random_tokens()
    states = one_document(trunk, head, tokens_1T)
    assert (states[2][0, 4] - draft_recursive(trunk, head, tokens_1T, 4)[2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*RELATIVE, *(f"chained_{name}" for name in RELATIVE)])
@torch.inference_mode()
def test_convolutions_that_know_no_documents_leak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnrolledRows, "_before", lambda _, inputs_BTC, back: shifted(inputs_BTC, back))
    with pytest.raises(AssertionError, match="not close"):
        test_packed_documents_unroll_as_they_do_alone(name)


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *PLACED, STREAMS, *CHAINS, *DRAFTS_ONLY])
@torch.inference_mode()
def test_packed_documents_unroll_as_they_do_alone(name: str) -> None:
    trunk, head = models(name)
    num_depths = 2
    wiring = head.convention
    pieces = [random_tokens()[:, :5], random_tokens()[:, 5:9]]
    padding_12 = torch.zeros(1, 2, dtype=torch.long)
    packed = unroll(
        head,
        trunk.head_input(torch.cat([*map(trunk.hidden, pieces), torch.zeros(1, 2, head.state_width)], dim=1), wiring),
        torch.cat([*pieces, padding_12], dim=1),
        trunk.embed,
        num_depths=num_depths,
        positions_BT=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0]]),
        document_BT=torch.tensor([[0] * 5 + [1] * 4 + [PADDING_DOCUMENT] * 2]),
    )
    for first, piece in zip((0, 5), pieces, strict=True):
        for depth, expected_1TD in enumerate(one_document(trunk, head, piece, num_depths), start=1):
            last = piece.shape[1] - depth  # later starts read past their document, and no target of theirs counts
            ours_TD = packed[depth - 1][0, first : first + last]
            assert_same(ours_TD, expected_1TD[0, :last], num_depths * num_terms(head))
    assert all(torch.isfinite(state).all() for state in packed)


def single_step(trunk: Trunk, head: MtpHead, token: int, position: int) -> Tensor:
    hidden_11D = torch.linspace(-1, 1, 32)[None, None]
    return torch.cat(step_alone(trunk, head, hidden_11D, torch.tensor([[token]]), depth=1, first=position))


@pytest.mark.parametrize(
    ("convention", "position", "reads_its_token"),
    [("auto", 0, True), ("auto", 1, True), ("vllm", 0, False), ("vllm", 1, True), ("sglang", 0, True)],
)
@torch.inference_mode()
def test_only_vllm_hides_the_first_embedding_of_glm(convention: str, position: int, reads_its_token: bool) -> None:
    trunk, head = models("glm4_moe")
    head.convention = trunk.family.convention(convention)
    outputs = [single_step(trunk, head, token, position) for token in (3, 4)]
    assert torch.equal(*outputs) is not reads_its_token


@torch.inference_mode()
def test_a_zero_first_embedding_is_the_embedding_of_a_zero_and_is_zero_in_every_document() -> None:
    trunk, head = models("glm4_moe")
    tokens_1T = torch.tensor([[5, 6, 7, 8, 9, 10]])
    hidden_1TD = trunk.hidden(tokens_1T)
    positions_1T = torch.tensor([[0, 1, 2, 0, 1, 2]])
    rest = {"num_depths": 2, "positions_BT": positions_1T, "document_BT": torch.tensor([[0, 0, 0, 1, 1, 1]])}

    def embed_without_firsts(read_1T: Tensor) -> Tensor:
        """Zero what depth 1 reads at the documents' first rows, by hand."""
        wanted_1T = ~((positions_1T == 0) & (read_1T == tokens_1T.roll(-1)))
        return trunk.embed(read_1T) * wanted_1T[..., None]

    by_hand = unroll(head, hidden_1TD, tokens_1T, embed_without_firsts, **rest)
    plain = unroll(head, hidden_1TD, tokens_1T, trunk.embed, **rest)
    head.convention = FIRST_ROW_EMBEDDING
    zeroed = unroll(head, hidden_1TD, tokens_1T, trunk.embed, **rest)
    for depth in range(2):
        torch.testing.assert_close(zeroed[depth], by_hand[depth], **TOLERANCE)
        assert (zeroed[depth] - plain[depth]).abs().amax(-1)[0, [0, 3]].min() > 1e-3


@torch.inference_mode()
def test_the_lm_head_reads_the_normed_state_whatever_is_recycled() -> None:
    trunk, head = models("glm4_moe")
    logit, recycled = single_step(trunk, head, 3, 2)
    assert torch.equal(logit, recycled)
    head.convention = BEFORE_NORM
    logit_before, recycled_before = single_step(trunk, head, 3, 2)
    assert torch.equal(logit_before, logit)
    assert not torch.equal(recycled_before, recycled)
    torch.testing.assert_close(head.blocks[0].final_norm(recycled_before), logit)


@torch.inference_mode()
def test_modules_may_each_read_the_trunk_or_leave_all_to_the_first() -> None:
    trunk, head = models("chained")
    tokens_1T = random_tokens()
    head.convention = Convention(recycle="trunk")
    states = one_document(trunk, head, tokens_1T, num_depths=2)
    hidden_1TD = trunk.hidden(tokens_1T)
    expected_SD, _ = step_alone(trunk, head, hidden_1TD[:, :-2], tokens_1T[:, 2:], 2, first=1)
    torch.testing.assert_close(states[1][0, :-2], expected_SD, **TOLERANCE)
    head.convention = Convention(modules="first")
    alone = tiny_head(trunk, num_modules=1)
    alone.blocks[0].load_state_dict(head.blocks[0].state_dict())
    ours, expected = (one_document(trunk, one, tokens_1T) for one in (head, alone))
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_centred_final_norm_is_a_layer_norm(dtype: torch.dtype) -> None:
    trunk = tiny_trunk("glm4_moe")
    head = tiny_head(trunk).to(dtype)
    hidden_BTD = torch.randn(1, NUM_TOKENS, trunk.config.hidden_size).to(dtype) + 1
    positions_BT = torch.arange(NUM_TOKENS)[None]
    inputs = {"depth": 1, "positions_BT": positions_BT, "mask_BTS": None, "cache": None}
    for centred in (False, True):
        head.convention = dataclasses.replace(BEFORE_NORM, centred=centred)
        found = mtp_step(head, hidden_BTD, trunk.embed(random_tokens()).to(dtype), **inputs)
        norm = head.blocks[0].final_norm
        block_BTD = found.recycled_BTD.float()
        expected_BTD = layer_norm(block_BTD, block_BTD.shape[-1:], norm.weight.float(), eps=norm.variance_epsilon)
        tolerance = 1e-5 if dtype is torch.float32 else 5e-2
        assert torch.allclose(found.logit_hidden_BTD.float(), expected_BTD, atol=tolerance) == centred
