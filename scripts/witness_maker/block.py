"""Make a DFlash drafter for a trunk and train it briefly on a chain.

Shapes: B texts, T tokens, P blocks of a text, N = B * P, J tokens of a block.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModel

from mtp_train.checkpoints.files import SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.checkpoints.writing import write_json
from mtp_train.heads.build import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.draft_model import draft_model, draft_plan
from mtp_train.trunk.load import Trunk
from witness_maker.chain import Chain, stir, train
from witness_maker.words import NUM_TOKENS

LAYERS, BLOCK = 2, 4
MASK_TOKEN = NUM_TOKENS
"""A row of the embedding that no token has."""
LEFT_OUT = ("_name_or_path", "dtype", "layer_types")
"""Fields of the trunk's config that are not those of a drafter."""
LAYER_TYPE = "muse_glimmer_assistant"
"""The model type of such drafters in transformers, whose layers are Qwen3's."""


def make_block_drafter(
    checkpoint: Checkpoint, trunk: Trunk, out: Path, chain: Chain, num_steps: int, generator: torch.Generator
) -> float:
    """Write a drafter in the format of DFlash's authors, trained on a chain; return the last loss, in nats."""
    out.mkdir(parents=True)
    num_layers = len(trunk.layers)
    fields = {
        **{name: value for name, value in trunk.config.to_dict().items() if name not in LEFT_OUT},
        "num_hidden_layers": LAYERS,
        "block_size": BLOCK,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [1, num_layers - 3],
    }
    model = AutoModel.from_config(CONFIG_MAPPING[LAYER_TYPE].from_dict({**fields, "model_type": LAYER_TYPE}))
    renames = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    own = {name: fields.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    fields |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": num_layers}
    write_json(out / "config.json", {**fields, "dflash_config": own})
    _save({renames.get(name, name): value for name, value in model.state_dict().items()}, out)
    found = draft_model(open_checkpoint(out))
    if found is None:
        raise ValueError(f"{out}: no draft model; expected the one that was written")
    head = build_head(draft_plan(found, checkpoint), text_config_of(checkpoint), dtype=torch.float32)
    trunk.show_to(head)
    stir(head, generator)
    loss = train([head], partial(_loss, trunk, head), chain, num_steps, generator)
    _save({name.removeprefix("blocks.0."): value for name, value in head.state_dict().items()}, out)
    return loss


def _save(tensors: dict[str, Tensor], out: Path) -> None:
    kept = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(kept, out / SINGLE_FILE, metadata={"format": "pt"})


def _loss(trunk: Trunk, head: Any, tokens_BT: Tensor) -> Tensor:
    """Return the cross-entropy of the blocks after every other token, mean."""
    read_BTD = trunk.head_input(trunk.hidden(tokens_BT), head.convention)
    starts_P = torch.arange(1, tokens_BT.shape[1] - BLOCK + 1, 2)
    states_NJD = head.blocks_at(read_BTD, tokens_BT, starts_P, trunk.embed)
    targets_BPJ = tokens_BT[:, starts_P[:, None] + torch.arange(1, BLOCK)]
    return cross_entropy(trunk.project(states_NJD[:, 1:]).flatten(0, 1), targets_BPJ.flatten())
