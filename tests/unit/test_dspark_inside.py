"""The drafter in a checkpoint of DeepSeek V4: its drafts are those of DeepSeek's definition, written out here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepseek_v4 import packed
from test_engine_drafts import norming_keys_of_the_text_alike, reading_layers, record
from torch import Tensor
from torch.nn.functional import softplus

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, holds, own_head, rewrite, save_stripped, set_fields
from json_files import write_rows
from mtp_inference.opening import OpenModel, open_model
from mtp_train import probe_drafts
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.runs import rescue
from mtp_train.trunk.load import Trunk
from runs import BYTE_VOCAB_SIZE, Capture, document, few_timed_prompts, refusal, shorten_probes
from scripted import drafted_in_rounds, plain_texts, random_prompt
from tiny import tiny_trunk

TRUNK = tiny_trunk("deepseek_v4", vocab_size=BYTE_VOCAB_SIZE)
CONFIG: Any = TRUNK.config
READ, BLOCK, MASK, RANK = (1, 3), 4, 5, 8
FIELDS = {
    "dspark_block_size": BLOCK,
    "dspark_target_layer_ids": [*READ],
    "dspark_noise_token_id": MASK,
    "dspark_markov_rank": RANK,
}
PROMPTS = [random_prompt(length, seed=length) for length in (3, 21, 1)]
WIDTH, HEADS, LATENT, STREAMS = CONFIG.hidden_size, CONFIG.num_attention_heads, CONFIG.head_dim, CONFIG.hc_mult
EXPERTS = CONFIG.n_routed_experts if hasattr(CONFIG, "n_routed_experts") else CONFIG.num_local_experts
EPSILON = CONFIG.rms_norm_eps


@functools.cache
def tensors() -> dict[str, Tensor]:
    """The drafter's tensors by the names of a release."""
    rank, groups, inner = CONFIG.q_lora_rank, CONFIG.o_groups, CONFIG.moe_intermediate_size
    per_group, mixes = HEADS * LATENT // groups, STREAMS * (2 + STREAMS)
    shapes: dict[str, tuple[int, ...]] = {
        "0.main_proj.weight": (WIDTH, len(READ) * WIDTH),
        "0.main_norm.weight": (WIDTH,),
    }
    for stage in range(len(READ)):
        parts: dict[str, tuple[int, ...]] = {
            **{"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "attn.attn_sink": (HEADS,)},
            **{"attn.q_norm.weight": (rank,), "attn.kv_norm.weight": (LATENT,)},
            **{"attn.wq_a.weight": (rank, WIDTH), "attn.wq_b.weight": (HEADS * LATENT, rank)},
            **{"attn.wkv.weight": (LATENT, WIDTH), "attn.wo_a.weight": (groups * CONFIG.o_lora_rank, per_group)},
            **{"attn.wo_b.weight": (WIDTH, groups * CONFIG.o_lora_rank)},
            **{"ffn.gate.weight": (EXPERTS, WIDTH), "ffn.gate.bias": (EXPERTS,)},
        }
        for part in ("attn", "ffn"):
            parts |= {f"hc_{part}_fn": (mixes, STREAMS * WIDTH), f"hc_{part}_base": (mixes,), f"hc_{part}_scale": (3,)}
        for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
            parts |= {f"ffn.{expert}.w{part}.weight": (inner, WIDTH) for part in (1, 3)}
            parts[f"ffn.{expert}.w2.weight"] = (WIDTH, inner)
        shapes |= {f"{stage}.{name}": shape for name, shape in parts.items()}
    last = {
        **{"norm.weight": (WIDTH,), "hc_head_fn": (STREAMS, STREAMS * WIDTH), "hc_head_base": (STREAMS,)},
        **{"hc_head_scale": (1,), "confidence_head.proj.weight": (1, WIDTH + RANK)},
        **{
            "markov_head.markov_w1.weight": (BYTE_VOCAB_SIZE, RANK),
            "markov_head.markov_w2.weight": (BYTE_VOCAB_SIZE, RANK),
        },
    }
    shapes |= {f"{len(READ) - 1}.{name}": shape for name, shape in last.items()}
    generator = torch.Generator().manual_seed(7)
    drawn = {f"mtp.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: value * (1.0 if "markov" in name else 0.3)
        if value.ndim > 1
        else 0.1 * value + ("norm" in name or "scale" in name)
        for name, value in drawn.items()
    }


def normed(state: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPSILON) * weight


def rotated(state: Tensor, positions_T: Tensor, sign: int = 1) -> Tensor:
    """Rotate neighbouring channels at the end of states (T, ..., X), without YaRN."""
    width = int(LATENT * CONFIG.rope_parameters["main"]["partial_rotary_factor"])
    theta = CONFIG.rope_parameters["main"]["rope_theta"]
    angles_TX = sign * positions_T[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    turns = torch.polar(torch.ones_like(angles_TX), angles_TX).view(len(state), *[1] * (state.ndim - 2), -1)
    pairs = torch.view_as_complex(state[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([state[..., :-width], torch.view_as_real(pairs * turns).flatten(-2)], dim=-1)


@dataclass(frozen=True)
class Definition:
    """DeepSeek-V4-Flash-DSpark's ``inference/model.py`` in fp32, and what it would be otherwise."""

    layers: tuple[int, ...] = READ
    mask: int = MASK
    window: int = CONFIG.sliding_window
    causal: bool = False
    moving: bool = False
    """Whether a token's window moves with it."""
    corrects: bool = True
    biased: bool = True
    """Whether the routers' bias chooses experts."""

    def own(self, stage: int, name: str) -> Tensor:
        return tensors()[f"mtp.{stage}.{name}"]

    @torch.no_grad()
    def best(self, text: Sequence[int], num_drafts: int) -> list[int]:
        """Draft after a text, the last token of which the trunk has not read."""
        last, drafts = len(READ) - 1, [text[-1]]
        state_TD = normed(self._read(text) @ self.own(0, "main_proj.weight").T, self.own(0, "main_norm.weight"))
        block_J = torch.tensor([text[-1], *[self.mask] * (BLOCK - 1)])
        streams_JSD = TRUNK.embed(block_J)[:, None].repeat(1, STREAMS, 1)
        for stage in range(len(READ)):
            streams_JSD = self._stage(stage, streams_JSD, state_TD)
        mixes_JS = normed(streams_JSD.flatten(1)) @ self.own(last, "hc_head_fn").T
        weight_JS = (mixes_JS * self.own(last, "hc_head_scale") + self.own(last, "hc_head_base")).sigmoid()
        mixed_JD = ((weight_JS + CONFIG.hc_eps)[..., None] * streams_JSD).sum(1)
        logits_JV = normed(mixed_JD, self.own(last, "norm.weight")) @ TRUNK.lm_head_VD.T
        for row_V in logits_JV[:num_drafts]:
            read_R = self.own(last, "markov_head.markov_w1.weight")[drafts[-1]]
            bias_V = self.own(last, "markov_head.markov_w2.weight") @ read_R
            drafts.append(int((row_V + self.corrects * bias_V).argmax()))
        return drafts[1:]

    def _read(self, text: Sequence[int]) -> Tensor:
        """Return the means of the residual streams after some of the trunk's layers, (T, N * D)."""
        seen: dict[int, Tensor] = {}
        hooks = [
            TRUNK.layers[layer].register_forward_hook(lambda _layer, _given, out, at=layer: seen.update({at: out}))
            for layer in self.layers
        ]
        TRUNK.causal_lm(torch.tensor([text[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([seen[layer][0].mean(1) for layer in self.layers], dim=-1)

    def _stage(self, stage: int, streams_JSD: Tensor, state_TD: Tensor) -> Tensor:
        for part, run in (
            ("attn", lambda x: self._attend(stage, x, state_TD)),
            ("ffn", lambda x: self._feed(stage, x)),
        ):
            mixed_JD, after_JS, kept_JSS = self._mixes(stage, part, streams_JSD)
            output_JD = run(normed(mixed_JD, self.own(stage, f"{part}_norm.weight")))
            kept_JSD = torch.einsum("jst,jsd->jtd", kept_JSS, streams_JSD)
            streams_JSD = after_JS[..., None] * output_JD[:, None] + kept_JSD
        return streams_JSD

    def _mixes(self, stage: int, part: str, streams_JSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixes = normed(streams_JSD.flatten(1)) @ self.own(stage, f"hc_{part}_fn").T
        base, scale = self.own(stage, f"hc_{part}_base"), self.own(stage, f"hc_{part}_scale")
        sizes, small = [STREAMS, STREAMS, STREAMS**2], CONFIG.hc_eps
        before, after, kept = (
            value * factor + bias
            for value, factor, bias in zip(mixes.split(sizes, -1), scale, base.split(sizes), strict=True)
        )
        kept = kept.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + small
        kept = kept / (kept.sum(-2, keepdim=True) + small)
        for _ in range(CONFIG.hc_sinkhorn_iters - 1):
            kept = kept / (kept.sum(-1, keepdim=True) + small)
            kept = kept / (kept.sum(-2, keepdim=True) + small)
        return ((before.sigmoid() + small)[..., None] * streams_JSD).sum(1), 2 * after.sigmoid(), kept

    def _attend(self, stage: int, input_JD: Tensor, state_TD: Tensor) -> Tensor:
        anchor = len(state_TD)
        places_J, all_S = anchor + torch.arange(BLOCK), torch.arange(anchor + BLOCK)
        low_JR = normed(input_JD @ self.own(stage, "attn.wq_a.weight").T, self.own(stage, "attn.q_norm.weight"))
        query_JHX = normed((low_JR @ self.own(stage, "attn.wq_b.weight").T).unflatten(-1, (HEADS, LATENT)))
        query_JHX = rotated(query_JHX, places_J)
        latent_SX = torch.cat([state_TD, input_JD]) @ self.own(stage, "attn.wkv.weight").T
        key_SX = rotated(normed(latent_SX, self.own(stage, "attn.kv_norm.weight")), all_S)
        scores_HJS = torch.einsum("jhx,sx->hjs", query_JHX, key_SX) * LATENT**-0.5
        first_J1 = (places_J if self.moving else torch.full((BLOCK,), anchor))[:, None] - self.window
        sees_JS = (all_S >= first_J1) & ((all_S <= places_J[:, None]) | (not self.causal))
        sink_HJ1 = self.own(stage, "attn.attn_sink")[:, None, None].expand(-1, BLOCK, 1)
        scores_HJS = torch.cat([scores_HJS.masked_fill(~sees_JS, -torch.inf), sink_HJ1], dim=-1)
        output_JHX = torch.einsum("hjs,sx->jhx", scores_HJS.softmax(-1)[..., :-1], key_SX)
        groups_JGX = rotated(output_JHX, places_J, -1).flatten(1).unflatten(-1, (CONFIG.o_groups, -1))
        inner_GRX = self.own(stage, "attn.wo_a.weight").unflatten(0, (CONFIG.o_groups, -1))
        joined_JR = torch.einsum("jgx,grx->jgr", groups_JGX, inner_GRX).flatten(1)
        return joined_JR @ self.own(stage, "attn.wo_b.weight").T

    def _feed(self, stage: int, input_JD: Tensor) -> Tensor:
        scores_JE = softplus(input_JD @ self.own(stage, "ffn.gate.weight").T).sqrt()
        bias_E = self.own(stage, "ffn.gate.bias") * self.biased
        chosen_JK = (scores_JE + bias_E).topk(CONFIG.num_experts_per_tok).indices
        rows = []
        for row_D, scores_E, chosen_K in zip(input_JD, scores_JE, chosen_JK, strict=True):
            weights_K = scores_E[chosen_K] / scores_E[chosen_K].sum() * CONFIG.routed_scaling_factor
            outputs = [self._expert(stage, f"experts.{number}", row_D) for number in chosen_K.tolist()]
            rows.append(weights_K @ torch.stack(outputs) + self._expert(stage, "shared_experts", row_D))
        return torch.stack(rows)

    def _expert(self, stage: int, name: str, row_D: Tensor) -> Tensor:
        gate, down, up = (self.own(stage, f"ffn.{name}.w{part}.weight") for part in (1, 2, 3))
        limit = CONFIG.swiglu_limit
        return down @ (torch.nn.functional.silu((gate @ row_D).clamp(max=limit)) * (up @ row_D).clamp(-limit, limit))


def saved(path: Path, *, drafter: bool = True, **fields: Any) -> Path:
    """Write the trunk with its drafter; None removes a field."""
    byte_tokenizer().save_pretrained(save_stripped(TRUNK, path))
    set_fields(path, FIELDS | fields)
    return rewrite(path, lambda stored: stored.update(tensors() if drafter else {}))


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return saved(tmp_path / "release")


def opened(release: Path) -> tuple[OpenModel, Trunk]:
    model = open_model(str(release), "own")
    return model, model.load_trunk(torch.device("cpu"), torch.float32)


def test_drafts_are_those_of_the_definition(release: Path) -> None:
    """No other layers, mask token, window, mask, correction or choice of experts gives them."""
    model, trunk = opened(release)
    texts, drafting = plain_texts(TRUNK, PROMPTS, 40), model.load_drafting(trunk)
    seen = drafted_in_rounds(trunk, drafting, texts, (BLOCK, 0, 2, BLOCK, BLOCK))
    right = Definition()
    changes: list[dict[str, Any]] = [{"layers": (0, 2)}, {"mask": MASK + 1}, {"window": 99}, {"window": 7}]
    changes += [{"causal": True}, {"moving": True}, {"corrects": False}, {"biased": False}]
    equal, *others = (
        sum(drafts == one.best(text, len(drafts)) for text, drafts in seen)
        for one in (right, *(replace(right, **change) for change in changes))
    )
    assert equal == len(seen) > max(others), (equal, others)


def test_the_commands_decode_with_it_and_name_it(release: Path, capfd: Capture) -> None:
    found = document(["inspect", release], capfd)
    assert (found["family"], found["status"], found["runs_here"]) == ("deepseek_v4_dspark", "healthy", "yes")
    assert f'{{"method":"dspark","num_speculative_tokens":{BLOCK}}}' in found["serves"]["vllm"]
    generate = ["generate", release, "--prompt", "Hello", "--max-new-tokens", 9, "--depth"]
    drafted, plain = (document([*generate, depth], capfd)["requests"][0] for depth in (BLOCK, 0))
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["num_draft_tokens"] == BLOCK * drafted["num_drafts"] > 0
    assert f"expected 0 to {BLOCK}." in refusal([*generate, BLOCK + 1], capfd)


def test_a_fine_tune_gets_it_back_and_nothing_trains_it(
    release: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    finetune = saved(tmp_path / "finetune", drafter=False)
    assert document(["inspect", finetune], capfd)["status"] == "declared_but_missing"
    document(["graft", finetune, "--from", release, "--out", out], capfd)
    grafted = all_tensors(out)
    assert holds(grafted, tensors())
    for command in (
        ["rescue", finetune, "--from", release, "--out", tmp_path / "rescued"],
        ["init", tmp_path / "recipe.yaml", "--trunk", release],
        ["check", "attach_head", f"model.trunk={release}"],
    ):
        assert "DSpark drafter is decoded with and not trained" in refusal(command, capfd)
    assert "expected an MTP head" in refusal(["export", release, "--out", tmp_path / "head", "--head-only"], capfd)


def test_a_probe_measures_it_on_a_fine_tune(
    release: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_probes(monkeypatch)
    monkeypatch.setattr(rescue, "LEAST_TAU", 1.0)
    finetune = saved(tmp_path / "finetune", drafter=False)
    rows = [{"prompt": f"{chr(97 + number) * 9} {number}", "group": number} for number in range(16)]
    data = write_rows(tmp_path / "prompts.jsonl", rows)
    with few_timed_prompts():
        found = document(["probe", finetune, "--from", release, "--data", data, "--out", tmp_path / "probe"], capfd)
    assert (found["verdict"], found["trained_tau"]) == ("graft", None)
    assert found["command"].startswith(f"mtp-train graft {finetune}")
    assert found["graft"] == found["base"]


@pytest.mark.parametrize("fields", [{"dspark_target_layer_ids": [1, 4]}, {"dspark_noise_token_id": BYTE_VOCAB_SIZE}])
def test_a_config_that_does_not_fit_the_trunk_is_refused(
    fields: dict[str, Any], tmp_path: Path, capfd: Capture
) -> None:
    other = saved(tmp_path / "other", **fields)
    assert "expected layers and a token of the trunk" in refusal(["inspect", other], capfd)


def test_without_its_fields_it_is_named_and_not_decoded(tmp_path: Path, capfd: Capture) -> None:
    other = saved(tmp_path / "other", dspark_noise_token_id=None)
    found = document(["inspect", other], capfd)
    assert (found["family"], found["status"]) == ("deepseek_v4", "foreign")
    assert "another kind of drafter" in refusal(["generate", other, "--prompt", "Hello"], capfd)


def test_matrices_in_fp8_and_experts_in_fp4_are_read(release: Path, capfd: Capture) -> None:
    plain = packed(release)
    assert document(["inspect", release], capfd)["status"] == "healthy"
    head: Any = own_head(open_checkpoint(release))
    assert torch.equal(head.module.fc.weight, plain["mtp.0.main_proj.weight"].bfloat16().float())


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [
        ("reading layers (1, 3)", reading_layers(1, 3)),
        (
            "norming the text's keys as those of its first layer",
            partial(norming_keys_of_the_text_alike, norm="kv_norm"),
        ),
    ],
)
def test_an_engine_s_wiring_is_named(verdict: str, fault: Any, release: Path, tmp_path: Path) -> None:
    drafts = record(tmp_path, release, "own", fault, depth=BLOCK)
    found = probe_drafts(release, drafts)
    assert (found.verdict, found.equal[verdict]) == (verdict, 1.0)
