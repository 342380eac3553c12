"""Model sizes and training settings: the demo of the package, and others outside of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from demo_maker.training import TrainSettings


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a model, with the settings of its training."""

    shape: Mapping[str, int]
    """Values of config fields."""
    base: TrainSettings
    base_tokens: int
    """Total number of training tokens of the base."""
    base_row_tokens: int
    base_rows: int
    """Rows per training step of the base."""
    finetune: TrainSettings
    finetune_rows: int
    finetune_epochs: float


# Eight layers, against one in the head, so that speculative decoding can save wall-clock time.
DEMO = Size(
    shape={
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    base=TrainSettings(lr=4e-3, warmup_steps=60),
    base_tokens=2_200_000,
    base_row_tokens=256,
    base_rows=8,
    finetune=TrainSettings(lr=2e-3, warmup_steps=30, weight_decay=0.0),
    finetune_rows=24,
    finetune_epochs=1,
)
# Half the width of the demo: settings that are derived from a model's size are compared with tuned ones on both.
SMALL = replace(
    DEMO,
    shape={
        **DEMO.shape,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    base=TrainSettings(lr=8e-3, warmup_steps=60),
    finetune=TrainSettings(lr=4e-3, warmup_steps=30, weight_decay=0.0),
)
# Rows of 256 values in every matrix, as the K-quants of llama.cpp require, and few enough layers and tokens for a CPU.
WIDE = replace(
    DEMO,
    shape={**DEMO.shape, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64},
    base_tokens=800_000,
    finetune_epochs=0.4,
)
# 5M parameters: small enough for ten fine-tunes and eighty heads on two cores in an afternoon.
ATLAS = replace(
    DEMO,
    shape={
        **DEMO.shape,
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "head_dim": 64,
    },
    base=TrainSettings(lr=2e-3, warmup_steps=60),
    base_tokens=1_400_000,
)
SIZES = {"small": SMALL, "demo": DEMO, "wide": WIDE, "atlas": ATLAS}
