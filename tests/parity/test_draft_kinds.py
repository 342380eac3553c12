"""EAGLE, EAGLE-3 and Medusa against their papers' forward, written out from the keys that engines read.

By hand every depth runs all rows anew, without masks, caches or modules of ours.
Shapes: T rows, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draft_models import CHOSEN, DraftModelToWrite
from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.checkpoints.files import SINGLE_FILE
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import of_kind
from mtp_train.families.kinds.eagle3 import Eagle3Layer
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from redrafted import unrolled
from scripted import plain_texts, random_prompt, spied_drafts
from tiny import draft_head, family_of, tiny_trunk

# One that is read after its final norm, one before it, one whose embedding is scaled, one with a recurrent state.
TRUNKS = ("llama", "qwen2", "gemma3_text", "qwen3_5")
KINDS: tuple[str, ...] = ("eagle", "eagle3", "medusa")
NUM_DEPTHS = 3
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


class ByHand:
    """A head's weights under the names of its export, and the trunk's own."""

    def __init__(self, trunk: Trunk, head: MtpHead) -> None:
        layout = HeadLayout(head.family, "model.", trunk.config.num_hidden_layers)
        self.weights = {
            key: value for name, ours in head.state_dict().items() for key, value in layout.split(name, ours)
        }
        self.trunk = trunk
        self.config = head.config

    def norm(self, key: str, state: Tensor) -> Tensor:
        scaled = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled * self.weights[f"{key}.weight"]

    def times(self, key: str, state: Tensor) -> Tensor:
        return state @ self.weights[f"{key}.weight"].T

    def attention(self, prefix: str, state_TD: Tensor) -> Tensor:
        config = self.config
        count = len(state_TD)
        query, key, value = (
            self.times(f"{prefix}self_attn.{name}_proj", state_TD).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(config)(state_TD, torch.arange(count)[None])
        query, key = (one[0] for one in apply_rotary_pos_emb(query[None], key[None], cos, sin))
        group = config.num_attention_heads // config.num_key_value_heads
        scores_HTT = query @ key.repeat_interleave(group, 0).transpose(-1, -2) * config.head_dim**-0.5
        later_TT = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights_HTT = scores_HTT.masked_fill(later_TT, -torch.inf).softmax(-1)
        mixed_TD = (weights_HTT @ value.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
        return self.times(f"{prefix}self_attn.o_proj", mixed_TD)

    def mlp(self, prefix: str, state: Tensor) -> Tensor:
        inner = silu(self.times(f"{prefix}mlp.gate_proj", state)) * self.times(f"{prefix}mlp.up_proj", state)
        return self.times(f"{prefix}mlp.down_proj", inner)

    def states(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return what transformers says of a text: its states after 0, 1, ... layers, the last one normed."""
        output = self.trunk.causal_lm.model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
        return [*(state[0] for state in output.hidden_states[:-1]), output.last_hidden_state[0]]

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.trunk.causal_lm.get_input_embeddings()(torch.tensor(list(tokens)))

    def eagle(self, tokens: Sequence[int], num_depths: int) -> list[Tensor]:
        """Draft greedily; return the states that the lm_head reads, (D,) each."""
        text, hidden_TD, read = list(tokens), self.states(tokens)[-1][:-1], []
        for _ in range(num_depths):
            state_TD = self.times("fc", torch.cat([self.embed(text[1:]), hidden_TD], -1))
            state_TD = state_TD + self.attention("layers.0.", state_TD)
            state_TD = state_TD + self.mlp("layers.0.", self.norm("layers.0.post_attention_layernorm", state_TD))
            hidden_TD = torch.cat([hidden_TD, state_TD[-1:]])
            read.append(state_TD[-1])
            text.append(self.choice(state_TD[-1]))
        return read

    def eagle3(
        self,
        tokens: Sequence[int],
        num_depths: int,
        *,
        later: int = 0,
        recycles_normed: bool = False,
        adds_normed: bool = False,
    ) -> list[Tensor]:
        """Do the same for EAGLE-3, of layers ``later`` than the ones that it reads."""
        count = self.trunk.config.num_hidden_layers
        states = self.states(tokens)
        of_layers = [states[min(index + later, count - 1)][:-1] for index in (2, count // 2, count - 3)]
        text = list(tokens)
        hidden_TD = self.times("fc", torch.cat(of_layers, -1))
        read = []
        for _ in range(num_depths):
            normed = [
                self.norm("midlayer.input_layernorm", self.embed(text[1:])),
                self.norm("midlayer.hidden_norm", hidden_TD),
            ]
            state_TD = self.attention("midlayer.", torch.cat(normed, -1)) + (normed[1] if adds_normed else hidden_TD)
            state_TD = state_TD + self.mlp("midlayer.", self.norm("midlayer.post_attention_layernorm", state_TD))
            read.append(self.norm("norm", state_TD[-1]))
            hidden_TD = torch.cat([hidden_TD, read[-1][None] if recycles_normed else state_TD[-1:]])
            text.append(self.choice(read[-1]))
        return read

    def medusa(self, tokens: Sequence[int], num_depths: int) -> list[Tensor]:
        """Do the same for Medusa: all depths read the state before the last token."""
        state_D = self.states(tokens)[-1][-2]
        return [
            state_D
            + silu(self.times(f"blocks.{index}.layers.0", state_D) + self.weights[f"blocks.{index}.layers.0.bias"])
            for index in range(num_depths)
        ]

    def choice(self, state_D: Tensor) -> int:
        return int(self.trunk.project(state_D).argmax())


def by_hand(trunk: Trunk, head: MtpHead, **wrongly: object) -> Callable[[Sequence[int], int], list[Tensor]]:
    forward = getattr(ByHand(trunk, head), head.family.kind.name)
    return lambda tokens, num_depths: forward(tokens, num_depths, **wrongly)


def draft_models(trunk_name: str, kind: str) -> tuple[Trunk, MtpHead]:
    trunk = tiny_trunk(trunk_name)
    return trunk, draft_head(trunk, kind, num_modules=4 if kind == "medusa" else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trunk_name", TRUNKS)
def test_drafts_are_those_of_the_paper(trunk_name: str, kind: str) -> None:
    trunk, head = draft_models(trunk_name, kind)
    with torch.inference_mode():
        forward = by_hand(trunk, head)
        for rows in spied_drafts(trunk, head, [4, 0, 0, 2, 1, 0, 4, 3]):
            for tokens, drafts in rows:
                assert drafts == [int(trunk.project(state_D).argmax()) for state_D in forward(tokens, len(drafts))]


@pytest.mark.parametrize("trunk_name", TRUNKS)
def test_a_layer_that_adds_to_the_normed_state_is_read_too(trunk_name: str) -> None:
    trunk, head = draft_models(trunk_name, "eagle3")
    layer = head.get_submodule("blocks.0.layer")
    assert isinstance(layer, Eagle3Layer)
    (plain, _), layer.adds_normed = unrolled_and_by_hand(trunk, head), True
    found, expected = unrolled_and_by_hand(trunk, head, adds_normed=True)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert not torch.allclose(plain[0], found[0], atol=1e-2)


def states_of_own_drafts(trunk: Trunk, head: MtpHead, tokens: list[int], num_depths: int) -> list[Tensor]:
    """Return the training unroll's states at the last start row, its depths fed with its own drafts."""
    text = list(tokens)
    read = []
    for depth in range(1, num_depths + 1):
        tokens_1T = torch.tensor([text])
        hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
        outputs = unrolled(head, hidden_1TD, tokens_1T, trunk.embed, depth)
        read.append(outputs[-1][0, len(tokens) - 2])
        text.append(int(trunk.project(read[-1]).argmax()))
    return read


@torch.inference_mode()
def unrolled_and_by_hand(trunk: Trunk, head: MtpHead, **wrongly: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states of the training unroll and those by hand, each fed with its own drafts."""
    trunk.show_layers(head.trunk_layers)
    tokens = random_prompt(9, seed=5)
    return states_of_own_drafts(trunk, head, tokens, NUM_DEPTHS), by_hand(trunk, head, **wrongly)(tokens, NUM_DEPTHS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trunk_name", TRUNKS)
def test_training_unrolls_what_decoding_drafts(trunk_name: str, kind: str) -> None:
    found, expected = unrolled_and_by_hand(*draft_models(trunk_name, kind))
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("wrongly", [{"later": 1}, {"recycles_normed": True}])
def test_what_is_wired_otherwise_shows(wrongly: dict[str, object]) -> None:
    found, expected = unrolled_and_by_hand(*draft_models("qwen3_5", "eagle3"), **wrongly)
    assert not torch.allclose(found[-1], expected[-1], atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trunk_name", TRUNKS)
def test_the_text_is_the_trunks_at_any_depth(trunk_name: str, kind: str) -> None:
    trunk, head = draft_models(trunk_name, kind)
    prompts = [random_prompt(length, seed=length) for length in (4, 1, 11)]
    texts = plain_texts(trunk, prompts, 16)
    for depth in range(5):
        for result, prompt in zip(
            SpeculativeDecoder(trunk, HeadDrafting(head), depth, ()).generate(prompts, 16), prompts, strict=True
        ):
            assert list(result.token_ids) == texts[tuple(prompt)]


def test_a_head_that_reads_the_last_state_alone_drafts_as_before_on_a_trunk_that_shows_more() -> None:
    trunk = tiny_trunk("qwen2")
    eagle = draft_head(trunk, "eagle")
    before = spied_drafts(trunk, eagle, [4, 2])
    trunk.show_layers(draft_head(trunk, "eagle3").trunk_layers)
    assert spied_drafts(trunk, eagle, [4, 2]) == before


def test_heads_that_read_other_layers_do_not_share_a_trunk() -> None:
    trunk = tiny_trunk("llama")
    trunk.show_layers((0, 1, 2))
    with pytest.raises(UnsupportedModelError, match=r"before layers \(2, 1, 0\), another before layers \(0, 1, 2\)"):
        SpeculativeDecoder(trunk, draft_head(trunk, "eagle3"), 1, ()).generate([[1, 2]], 2)


def test_a_block_for_each_depth_is_all_there_is() -> None:
    trunk = tiny_trunk("llama")
    with pytest.raises(UnsupportedModelError, match="depth: 3; expected at most 2"):
        SpeculativeDecoder(trunk, draft_head(trunk, "medusa", num_modules=2), 3, ())


def test_trunks_with_heads_of_their_own_keep_to_those() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Write head\.kind: mtp"):
        of_kind(family_of("deepseek_v3"), "eagle3")


# What was exported


class FromExport(ByHand):
    """EAGLE-3's forward with nothing but the exported tensors; the embedding and the states are the trunk's."""

    def __init__(self, written: DraftModelToWrite) -> None:
        super().__init__(written.trunk, written.head)
        self.weights = load_file(written.out / SINGLE_FILE)

    def choice(self, state_D: Tensor) -> int:
        row = int(self.times("lm_head", state_D).argmax())
        return row + int(self.weights["d2t"][row])

    def drafts(self, rounds: list[tuple[list[int], list[int]]], **wrongly: int) -> list[list[int]]:
        return [
            [self.choice(state_D) for state_D in self.eagle3(tokens, len(drafts), **wrongly)]
            for tokens, drafts in rounds
        ]


@torch.inference_mode()
def test_what_the_export_drafts_by_hand_is_what_we_draft(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    by_hand = FromExport(written)
    found = spied_drafts(written.trunk, written.head, [3, 0, 2, 4, 3], CHOSEN.long())
    rounds = [row for rows in found for row in rows]
    ours = [drafts for _, drafts in rounds]
    assert by_hand.drafts(rounds) == ours
    assert len({token for drafts in ours for token in drafts}) > 2
    # Neither states of other layers nor tokens in the place of offsets would go unseen.
    assert by_hand.drafts(rounds, later=1) != ours
    by_hand.weights["d2t"] = CHOSEN.long()
    with pytest.raises(IndexError):
        by_hand.drafts(rounds)
