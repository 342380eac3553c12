"""Tiny checkpoints on disk: with a head, stripped as save_pretrained leaves them, wrapped, sharded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from json_files import read_json, write_json
from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, Checkpoint, JsonObject, open_checkpoint
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk, load_trunk
from plain_decoding import plain_greedy
from tiny import VOCAB_SIZE, num_released_modules, tiny_head, tiny_trunk

Tensors = dict[str, Tensor]
"""Tensors by their key."""

WRAPPER_CONFIG: JsonObject = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": 32,
    },
}


WRAPPER_CONFIG_4: JsonObject = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "vision_config": {**WRAPPER_CONFIG["vision_config"], "model_type": "qwen4_exp_vision"},
}


def save_tensors(tensors: Tensors, file: Path) -> None:
    """Save a file of weights with the format in it, without which transformers refuses the file."""
    save_file(tensors, file, {"format": "pt"})


def save_stripped(trunk: Trunk, path: Path) -> Path:
    """Save a trunk as users do: ``save_pretrained``, the config still declaring one head module."""
    trunk.causal_lm.save_pretrained(path)
    if trunk.family.declaration.section is None:
        set_fields(path, trunk.family.declaring(num_released_modules(trunk), {}))
    stand_in = trunk.family.trunk.stand_in
    if stand_in is not None and stand_in.wrapper is not None:
        wrap_text_config(path, stand_in.wrapper)
    elif stand_in is not None:
        # Saved by the class that stands in: the release has a name of its own.
        set_fields(path, {"model_type": trunk.family.model_types[0], "architectures": [trunk.family.name]})
    return path


def save_with_head(trunk: Trunk, head: MtpHead, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a single-file checkpoint that holds its head, shared keys included, as a release does."""
    save_stripped(trunk, path)
    tensors = load_file(path / SINGLE_FILE)
    layout = open_checkpoint(path).layout
    for name, value in head.state_dict().items():
        tensors |= {key: part.to(dtype).contiguous() for key, part in layout.split(name, value)}
    for shared, trunk_key in layout.family.keys.shared.items():
        source = layout.trunk_key(trunk_key, tensors)
        for module in range(len(head.blocks)):
            layer = layout.num_hidden_layers + module
            native = shared.format(trunk=layout.trunk_prefix, layer=layer, module=module)
            tensors[native] = tensors[source].clone()
    save_tensors(tensors, path / SINGLE_FILE)
    return path


def base_and_finetune(
    directory: Path, family_name: str, *, tied: bool = False, vocab_size: int = VOCAB_SIZE
) -> tuple[Path, Path]:
    """Write a base with its head, and a fine-tune of it (every trunk weight moved a little) without."""
    base = tiny_trunk(family_name, tied=tied, vocab_size=vocab_size)
    save_with_head(base, tiny_head(base), directory / "base")
    finetune = tiny_trunk(family_name, tied=tied, vocab_size=vocab_size)
    with torch.no_grad():
        for number, parameter in enumerate(finetune.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return directory / "base", save_stripped(finetune, directory / "finetune")


def set_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of the text config, remove those that are None."""
    config = read_json(path / "config.json")
    text_config = config.get("text_config", config)
    text_config.update(fields)
    for field, value in fields.items():
        if value is None:
            del text_config[field]
    write_json(path / "config.json", config)


def rewrite(path: Path, change: Callable[[Tensors], object], file: str = SINGLE_FILE) -> Path:
    """Change the tensors of one file of weights in place."""
    tensors = load_file(path / file)
    change(tensors)
    save_tensors(tensors, path / file)
    return path


def fuse_experts(path: Path) -> Path:
    """Store a tiny mixture's experts stacked, as some releases do, those of its head too."""
    tensors = load_file(path / SINGLE_FILE)
    for prefix in {match[1] for key in tensors if (match := re.match(r"(.+\.experts\.)\d+\.", key))}:
        count = len({key for key in tensors if key.startswith(prefix) and key.endswith(".down_proj.weight")})
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]
    save_tensors(tensors, path / SINGLE_FILE)
    return path


def shard(path: Path, num_shards: int = 3) -> Path:
    """Turn a single-file checkpoint into an indexed one, tensors dealt out in turn."""
    tensors = load_file(path / SINGLE_FILE)
    files = [f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors" for index in range(num_shards)]
    weight_map = {key: files[number % num_shards] for number, key in enumerate(sorted(tensors))}
    for file in files:
        save_tensors({key: value for key, value in tensors.items() if weight_map[key] == file}, path / file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(path / INDEX_FILE, index)
    (path / SINGLE_FILE).unlink()
    return path


def wrap_as_vision_language(path: Path, wrapper: Mapping[str, Any] = WRAPPER_CONFIG) -> Path:
    """Turn a text-only Qwen3.5 or Qwen4-Exp checkpoint into the layout of a vision-language release."""
    text_config = read_json(path / "config.json")
    text_config.pop("architectures")
    config = {**wrapper, "text_config": text_config, "tie_word_embeddings": text_config["tie_word_embeddings"]}
    tensors = {_wrapped_key(key): value for key, value in load_file(path / SINGLE_FILE).items()}
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    save_tensors(tensors, path / SINGLE_FILE)
    write_json(path / "config.json", config)
    return path


def wrap_text_config(path: Path, model_type: str) -> None:
    """Put a text model's config into a wrapper's, with a section for the head, as Inkling's releases have it."""
    text_config = read_json(path / "config.json")
    section = {
        name: text_config.pop(field)
        for name, field in (
            ("num_nextn_predict_layers", "num_mtp_layers"),
            ("chain_hidden_post_norm", "chain_hidden_post_norm"),
            ("local_layer_ids", "mtp_local_layer_ids"),
        )
    }
    del text_config["model_type"], text_config["architectures"]
    config = {"architectures": ["X"], "model_type": model_type, "text_config": text_config, "mtp_config": section}
    write_json(path / "config.json", config)


def _wrapped_key(key: str) -> str:
    return "model.language_model." + key.removeprefix("model.") if key.startswith("model.") else key


def own_head(checkpoint: Checkpoint) -> MtpHead:
    """Load a checkpoint's head in fp32."""
    plan = graft_plan(checkpoint, checkpoint, "auto")
    return build_head(plan, text_config_of(checkpoint), dtype=torch.float32).eval()


@torch.inference_mode()
def assert_lossless(path: Path) -> None:
    """A checkpoint decodes with its own head as without, at every depth that a head of one to three modules has."""
    checkpoint = open_checkpoint(path)
    prompt = [5, 9, 3, 44, 60]
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    head = own_head(checkpoint)
    plain = plain_greedy(trunk, prompt, 24, ())
    for depth in (1, 2, 3):
        (result,) = SpeculativeDecoder(trunk, HeadDrafting(head), depth, ()).generate([prompt], 24)
        assert result.num_drafts > 0
        assert list(result.token_ids) == plain, depth


def all_tensors(path: Path) -> Tensors:
    """Load every tensor of a checkpoint directory, however it is laid out."""
    checkpoint = open_checkpoint(path)
    return {key: checkpoint.read(key) for key in checkpoint.tensors}


def split(path: Path) -> tuple[Tensors, Tensors]:
    """Return a checkpoint's trunk and head, what the head repeats of the trunk left out."""
    layout = open_checkpoint(path).layout
    tensors = {key: value for key, value in all_tensors(path).items() if layout.shared_key(key) is None}
    head = {key: value for key, value in tensors.items() if layout.is_head_key(key)}
    return {key: value for key, value in tensors.items() if key not in head}, head


def shared_by_the_head(path: Path) -> list[str]:
    """Assert that the head's copies of the embedding and the lm_head equal the trunk's; return their keys."""
    layout = open_checkpoint(path).layout
    tensors = all_tensors(path)
    repeated = [key for key in tensors if layout.is_head_key(key) and layout.shared_key(key) is not None]
    for key in repeated:
        is_output = key.endswith("head.weight") and layout.lm_head_key in tensors
        assert torch.equal(tensors[key], tensors[layout.lm_head_key if is_output else layout.embed_key]), key
    return repeated


def same(ours: Tensors, theirs: Tensors) -> bool:
    """Whether two sets of tensors are equal, bit for bit."""
    return ours.keys() == theirs.keys() and holds(ours, theirs)


def holds(whole: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> bool:
    """Whether tensors stand in a larger set under their names, bit for bit."""
    return all(torch.equal(whole[key], value) for key, value in part.items())
