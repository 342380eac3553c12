"""Build and save the demo's model: a Qwen3.5 text model that fits in the package and that serving engines load."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from demo_maker.sizes import Size
from demo_maker.tokenizer import MAX_TOKENS
from mtp_train.checkpoints.files import INDEX_FILE
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.writing import new_directory, write_json
from mtp_train.families.models.beside_the_trunk import QWEN3_5
from mtp_train.heads.module import MtpHead

INIT_STD = 0.04
SHARD_SIZE = "2MB"


def make_config(size: Size) -> Qwen3_5TextConfig:
    """Return the config.

    vLLM's CPU kernels need linear-attention head sizes of 128 and attention head sizes of at least 32. The rotary
    parameters have no ``mrope_*`` keys, since vLLM treats a model with them as multimodal.
    """
    return Qwen3_5TextConfig(
        **size.shape,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
    )


def fresh_model(config: Qwen3_5TextConfig, *, seed: int) -> tuple[Qwen3_5ForCausalLM, MtpHead]:
    """Return a randomly initialised trunk and its native head, in fp32."""
    torch.manual_seed(seed)
    trunk = Qwen3_5ForCausalLM(config)
    head = MtpHead(QWEN3_5, config, num_modules=1, convention=QWEN3_5.wiring.default)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=INIT_STD)
    return trunk, head


def checkpoint_tensors(trunk: PreTrainedModel, head: MtpHead) -> dict[str, Tensor]:
    """Return the tensors of trunk and head under native keys, in bf16; the tied output matrix is left out."""
    layout = HeadLayout(QWEN3_5, "model.", trunk.config.num_hidden_layers)
    tensors = {key: value for key, value in trunk.state_dict().items() if key != "lm_head.weight"}
    for name, value in head.state_dict().items():
        tensors.update(layout.split(name, value))
    return {key: value.detach().to(torch.bfloat16).contiguous() for key, value in tensors.items()}


def save_base(trunk: PreTrainedModel, head: MtpHead, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the base in the layout of a release: sharded, with an index, head and trunk in the same files."""
    tensors = checkpoint_tensors(trunk, head)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_SIZE)
    config = trunk.config
    config.architectures, config.dtype = ["Qwen3_5ForCausalLM"], torch.bfloat16
    set_ends(config, tokenizer)
    with new_directory(out, what="the base") as directory:
        for file, keys in split.filename_to_tensors.items():
            save_file({key: tensors[key] for key in keys}, directory / file, metadata={"format": "pt"})
        write_json(directory / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        config.save_pretrained(directory)
        _generation_config(tokenizer).save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def load_trunk_to_train(path: Path) -> PreTrainedModel:
    """Load the trunk of a checkpoint in fp32. transformers ignores the head's tensors."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def save_finetune(trunk: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the fine-tune with ``save_pretrained``, which keeps the head's fields in the config but not its tensors."""
    set_ends(trunk.config, tokenizer)
    trunk.generation_config = _generation_config(tokenizer)
    with new_directory(out, what="the fine-tune") as directory:
        trunk.to(torch.bfloat16).save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def set_ends(config: Qwen3_5TextConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Set the EOS and padding ids of a config to the tokenizer's."""
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


def _generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    return GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False)
