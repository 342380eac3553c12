"""The drafter in a checkpoint of DeepSeek V4: its drafts are those of DeepSeek's definition, written out here."""

from __future__ import annotations

import copy
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
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, holds, own_head, rewrite, save_stripped, set_fields
from heads_by_hand import HANDS
from json_files import write_rows
from mtp_inference.opening import OpenModel, open_model
from mtp_train import probe_drafts
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.runs import rescue
from mtp_train.trunk.load import Trunk
from mtp_train.upstream.transformers_private import CACHE
from runs import BYTE_VOCAB_SIZE, Capture, document, drafted_by, few_timed_prompts, refusal, shorten_probes
from scripted import drafted_in_rounds, plain_texts, random_prompt
from tiny import tiny_trunk

TRUNK = tiny_trunk("deepseek_v4", vocab_size=BYTE_VOCAB_SIZE)
CONFIG: Any = TRUNK.config
READ, BLOCK, MASK, RANK = (1, 3), 4, 5, 8
LAST = len(READ) - 1
FIELDS = {
    "dspark_block_size": BLOCK,
    "dspark_target_layer_ids": [*READ],
    "dspark_noise_token_id": MASK,
    "dspark_markov_rank": RANK,
}
PROMPTS = [random_prompt(length, seed=length) for length in (3, 21, 1)]


@functools.cache
def parts() -> nn.ModuleDict:
    """The drafter's parts with random weights; the layers are transformers'."""
    config = copy.deepcopy(CONFIG)
    width = CONFIG.hidden_size
    kinds = {"layer_types": ["sliding_attention"] * len(READ), "mlp_layer_types": ["moe"] * len(READ)}
    config.update({**kinds, "num_hidden_layers": len(READ), "_attn_implementation": "eager"})
    made = {
        "main_proj": nn.Linear(len(READ) * width, width, bias=False),
        "main_norm": stock.DeepseekV4RMSNorm(width),
        "layers": nn.ModuleList(stock.DeepseekV4DecoderLayer(config, stage) for stage in range(len(READ))),
        "hc_head": stock.DeepseekV4HyperHead(config),
        "norm": stock.DeepseekV4RMSNorm(width),
        "markov_w1": nn.Embedding(BYTE_VOCAB_SIZE, RANK),
        "markov_w2": nn.Linear(RANK, BYTE_VOCAB_SIZE, bias=False),
        "confidence_head": nn.Linear(width + RANK, 1, bias=False),
        "rotary": stock.DeepseekV4RotaryEmbedding(config),
    }
    found = nn.ModuleDict(made).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(7)
    for name, value in found.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        scale = 1.0 if "markov" in name else 0.3
        value.copy_(scale * noise if value.ndim > 1 else 0.1 * noise + ("norm" in name or "scale" in name))
    return found


def tensors() -> dict[str, Tensor]:
    """Return the drafter's tensors by the names of a release."""
    state = parts().state_dict()
    first = {"main_proj.weight", "main_norm.weight"}
    last = f"mtp.{LAST}."
    found = {f"mtp.0.{name}": state[name] for name in first}
    found |= {f"{last}markov_head.{name}.weight": state[f"{name}.weight"] for name in ("markov_w1", "markov_w2")}
    found |= {f"{last}hc_head_{name}": state[f"hc_head.hc_{name}"] for name in ("fn", "base", "scale")}
    found |= {f"{last}norm.weight": state["norm.weight"]}
    found |= {f"{last}confidence_head.proj.weight": state["confidence_head.weight"]}
    for stage, layer in enumerate(parts()["layers"]):
        for name, value in layer.state_dict().items():
            place, _, part = name.rpartition(".experts.")
            names = ("gate_proj", "up_proj") if "gate" in part else ("down_proj",)
            stored = {name: value}
            if place:
                stored = {
                    f"{place}.experts.{number}.{own}.weight": piece.clone()
                    for number, expert in enumerate(value)
                    for own, piece in zip(names, expert.chunk(len(names)), strict=True)
                }
            for key, one in stored.items():
                for theirs, ours in reversed(HANDS["deepseek_v4"].renamed.items()):
                    key = key.replace(ours, theirs)
                found[f"mtp.{stage}.{key}"] = one
    return found


class KeysOfText:
    """The keys and values of the text before a block, in the place of a layer's cache."""

    def __init__(self, text_11SX: Tensor) -> None:
        self.text_11SX = text_11SX

    def update(self, keys: Tensor, *_unused: Any, **_also_unused: Any) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.text_11SX, keys], dim=2)
        return both, both


@dataclass(frozen=True)
class Definition:
    """DeepSeek-V4-Flash-DSpark's ``inference/model.py``, and what it would be otherwise."""

    layers: tuple[int, ...] = READ
    mask: int = MASK
    window: int = CONFIG.sliding_window
    causal: bool = False
    moving: bool = False
    """Whether a token's window moves with it."""
    corrects: bool = True

    @torch.no_grad()
    def best(self, text: Sequence[int], num_drafts: int) -> list[int]:
        """Draft after a text, the last token of which the trunk has not read."""
        own, anchor, drafts = parts(), len(text) - 1, [text[-1]]
        state_1TD = own["main_norm"](own["main_proj"](self._read(text)))
        block_1J = torch.tensor([[text[-1], *[self.mask] * (BLOCK - 1)]])
        streams = TRUNK.embed(block_1J)[:, :, None].repeat(1, 1, CONFIG.hc_mult, 1)
        all_1S = torch.arange(anchor + BLOCK)[None]
        places_1J = all_1S[:, anchor:]
        from_J1 = (places_1J.mT if self.moving else torch.full((BLOCK, 1), anchor)) - self.window
        sees_JS = (all_1S >= from_J1) & ((all_1S <= places_1J.mT) | (not self.causal))
        before, within = (own["rotary"](state_1TD, one, "main") for one in (all_1S[:, :anchor], places_1J))
        for layer in own["layers"]:
            attention = layer.self_attn
            keys_11TX = attention.kv_norm(attention.kv_proj(state_1TD))[:, None]
            streams = layer(
                streams,
                position_embeddings={"main": within},
                position_ids=places_1J,
                attention_mask=torch.where(sees_JS, 0.0, -torch.inf)[None, None],
                **{CACHE: KeysOfText(stock.apply_rotary_pos_emb(keys_11TX, *before))},
            )
        logits_JV = TRUNK.causal_lm.lm_head(own["norm"](own["hc_head"](streams)))[0]
        for row_V in logits_JV[:num_drafts]:
            bias_V = own["markov_w2"](own["markov_w1"].weight[drafts[-1]])
            drafts.append(int((row_V + self.corrects * bias_V).argmax()))
        return drafts[1:]

    def _read(self, text: Sequence[int]) -> Tensor:
        """Return the means of the residual streams after some of the trunk's layers, (1, T, N * D)."""
        seen: dict[int, Tensor] = {}
        hooks = [
            TRUNK.layers[layer].register_forward_hook(lambda _layer, _given, out, at=layer: seen.update({at: out}))
            for layer in self.layers
        ]
        TRUNK.causal_lm(torch.tensor([text[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([seen[layer].mean(2) for layer in self.layers], dim=-1)


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
    """No other layers, mask token, window, mask or correction gives them."""
    model, trunk = opened(release)
    texts = plain_texts(TRUNK, PROMPTS, 40)
    drafting = model.load_drafting(trunk)
    seen = drafted_in_rounds(trunk, drafting, texts, (BLOCK, 0, 2, BLOCK, BLOCK))
    right = Definition()
    changes: list[dict[str, Any]] = [{"layers": (0, 2)}, {"mask": MASK + 1}, {"window": 99}, {"window": 7}]
    changes += [{"causal": True}, {"moving": True}, {"corrects": False}]
    equal, *others = (
        sum(drafts == one.best(text, len(drafts)) for text, drafts in seen)
        for one in (right, *(replace(right, **change) for change in changes))
    )
    assert equal == len(seen) > max(others), (equal, others)


def test_the_commands_decode_with_it_and_name_it(release: Path, capfd: Capture) -> None:
    found = document(["inspect", release], capfd)
    assert (found["family"], found["status"], found["runs_here"]) == ("deepseek_v4_dspark", "healthy", "yes")
    assert f'{{"method":"dspark","num_speculative_tokens":{BLOCK}}}' in found["serves"]["vllm"]
    generate = ["generate", release, "--prompt", "Hello", "--max-new-tokens", 9]
    drafted_by("own", BLOCK, generate, capfd)
    assert f"expected 0 to {BLOCK}." in refusal([*generate, "--depth", BLOCK + 1], capfd)
    assert open_model(str(release), "own").deepest == BLOCK


def test_a_fine_tune_gets_it_back_and_nothing_trains_it(
    release: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    finetune = saved(tmp_path / "finetune", drafter=False)
    assert document(["inspect", finetune], capfd)["status"] == "declared_but_missing"
    told = document(["graft", finetune, "--from", release, "--out", out], capfd)
    served = f'{{"method":"dspark","num_speculative_tokens":{BLOCK}}}'
    assert served in told["serves"]["vllm"]
    grafted = all_tensors(out)
    assert holds(grafted, tensors())
    for command in (
        ["rescue", finetune, "--from", release, "--out", tmp_path / "rescued"],
        ["init", tmp_path / "recipe.yaml", "--trunk", release],
        ["check", "attach_head", f"model.trunk={release}"],
        ["run", "attach_head", f"model.trunk={release}", f"run_dir={tmp_path / 'run'}"],
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


def test_it_is_compared_with_prompt_lookup_and_none(release: Path, tmp_path: Path, capfd: Capture) -> None:
    rows = [{"prompt": f"{chr(97 + number) * 9} {number}", "group": number} for number in range(3)]
    arms = [f"dspark={release}", f"lookup={release}+ngram"]
    suite = ["--suite", write_rows(tmp_path / "suite.jsonl", rows), "--depths", BLOCK, "--max-new-tokens", 12]
    report = document(["compare", *arms, *suite, "--temperatures", 0, "--out", tmp_path / "compared"], capfd)
    assert {cell["arm"]: cell["depth"] for cell in report["cells"]} == {"none": 0, "dspark": BLOCK, "lookup": BLOCK}
    assert report["lossless"]["faults"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"dspark_target_layer_ids": [1, 4]},
        {"dspark_target_layer_ids": []},
        {"dspark_noise_token_id": BYTE_VOCAB_SIZE},
    ],
)
def test_a_config_that_does_not_fit_the_trunk_is_refused(
    fields: dict[str, Any], tmp_path: Path, capfd: Capture
) -> None:
    other = saved(tmp_path / "other", **fields)
    assert "expected layers and a token of the trunk" in refusal(["inspect", other], capfd)


@pytest.mark.parametrize("fields", [{"dspark_noise_token_id": None}, {"dspark_target_layer_ids": 3}])
def test_without_its_fields_it_is_named_and_not_decoded(fields: dict[str, Any], tmp_path: Path, capfd: Capture) -> None:
    other = saved(tmp_path / "other", **fields)
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
