#!/usr/bin/env python
"""Train a small trunk of an architecture without an MTP head, on the demo's chats, to attach heads to.

    python scripts/make_text_trunk.py llama DIR

The trunk is trained from scratch with the demo's tokenizer, on prompts and answers, and saved by transformers. The
prompts of the package (``demo:prompts``) are about Python modules that do not occur in its training text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from demo_maker.model import set_ends
from demo_maker.sizes import DEMO
from demo_maker.stages import batches_by_length, held_out_loss, padded
from demo_maker.texts import gather_texts, tokenise_exchange
from demo_maker.tokenizer import MAX_TOKENS
from demo_maker.training import TrainSettings, train
from mtp_train.checkpoints.demo import demo_path
from mtp_train.checkpoints.writing import new_directory

FAMILIES = ("llama", "qwen3")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
}
SETTINGS = TrainSettings(lr=4e-3, warmup_steps=60)
EPOCHS = 1


def main() -> None:
    """Train and save the trunk, and print its losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(demo_path("finetune"))
    trunk = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(arguments.family, vocab_size=len(tokenizer), **SIZES), dtype=torch.float32
    )
    texts = gather_texts()
    exchanges = [tokenise_exchange(one, tokenizer) for one in texts.chat]
    unseen = [tokenise_exchange(one, tokenizer) for one in texts.prompts[::8]]
    pad = tokenizer.pad_token_id

    def loss_of(batch: list) -> dict[str, Tensor]:  # type: ignore[type-arg]
        tokens_BT, _, mask_BT = padded(batch, pad)
        logits_BTV = trunk(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).logits
        wanted_BT = mask_BT[:, 1:].bool()
        return {"text": cross_entropy(logits_BTV[:, :-1][wanted_BT].float(), tokens_BT[:, 1:][wanted_BT])}

    num_steps = EPOCHS * len(exchanges) // DEMO.finetune_rows
    log = train(trunk, batches_by_length(exchanges, DEMO.finetune_rows), loss_of, SETTINGS, num_steps=num_steps)
    set_ends(trunk.config, tokenizer)
    with new_directory(arguments.directory, what="the trunk") as directory:
        trunk.to(torch.bfloat16).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    figures = {"steps": num_steps, "parameters": sum(parameter.numel() for parameter in trunk.parameters())}
    print(json.dumps({**figures, "held_out_answer_loss": held_out_loss(trunk.float(), unseen, pad), **log[-1]}))


if __name__ == "__main__":
    sys.exit(main())
