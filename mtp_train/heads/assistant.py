"""Check and load an external drafter ("assistant"): a small model with a checkpoint of its own, run by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.quantised import is_scale
from mtp_train.errors import CheckpointError
from mtp_train.families import Assistant
from mtp_train.heads.diagnose import HeadDiagnosis, choose_attention, compare_shapes, named_rejections
from mtp_train.upstream.transformers_private import quiet_loading


def _config_of(checkpoint: Checkpoint) -> PretrainedConfig:
    with named_rejections(checkpoint.path):
        config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint.path)
        choose_attention(config, checkpoint.path)
    return config


def diagnose_assistant(checkpoint: Checkpoint, assistant: Assistant) -> HeadDiagnosis:
    """Compare an external drafter's tensor keys with the parameters of transformers' class; allocates no weights.

    A tied lm_head may be stored or left out.
    """
    config = _config_of(checkpoint)
    with (
        named_rejections(checkpoint.path),
        assistant.building(config.get_text_config()),
        torch.device("meta"),
    ):
        model = AutoModelForCausalLM.from_config(config)
    known = {name: value.shape for name, value in model.state_dict().items()}
    # named_parameters lists tied parameters once, under their first name.
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    found = {name: info.shape for name, info in checkpoint.tensors.items() if not is_scale(name, checkpoint.tensors)}
    needed = {name: shape for name, shape in known.items() if name in once or name in found}
    return HeadDiagnosis(1, int(bool(found)), tuple(found), *compare_shapes(found, needed))


def load_assistant(
    checkpoint: Checkpoint, assistant: Assistant, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Any:
    """Load transformers' model of an external drafter, frozen and in eval mode.

    Raises:
        CheckpointError: Weights are missing or do not fit, or transformers rejects the config.
    """
    diagnosis = diagnose_assistant(checkpoint, assistant)
    if not diagnosis.complete:
        raise CheckpointError(
            f"{checkpoint.path}: {diagnosis.describe()}; expected a whole {assistant.title}. Download it again."
        )
    config = _config_of(checkpoint)
    with quiet_loading(), assistant.building(config.get_text_config()):
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, config=config, dtype=dtype)
    return model.requires_grad_(False).to(device).eval()
