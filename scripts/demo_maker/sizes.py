"""How large the model is, what it reads and for how long: the demo that ships, and one for a GPU that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from demo_maker.training import TrainSettings


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size."""

    shape: Mapping[str, int]
    """Fields of the config by their names."""
    base: TrainSettings
    base_tokens: int
    """Tokens that the base is trained on, in all."""
    base_row_tokens: int
    base_rows: int
    """Rows of a step."""
    finetune: TrainSettings
    finetune_rows: int
    finetune_epochs: int
    packages: tuple[str, ...] = ()
    """Installed packages whose source the base reads beside the standard library's."""


# Eight layers against the head's one leave speculative decoding something to gain in wall-clock time.
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
# Nobody has trained this one yet: rates and lengths are guesses from the demo's.
LARGE = Size(
    shape={
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    base=TrainSettings(lr=1.5e-3, warmup_steps=100),
    base_tokens=16_000_000,
    base_row_tokens=512,
    base_rows=32,
    finetune=TrainSettings(lr=5e-4, warmup_steps=30, weight_decay=0.0),
    finetune_rows=48,
    finetune_epochs=2,
    packages=("torch", "transformers", "accelerate", "peft", "matplotlib"),
)
SIZES = {"demo": DEMO, "large": LARGE}
