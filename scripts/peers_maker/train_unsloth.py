#!/usr/bin/env python
"""Train a native MTP head with unsloth's own head, loss, batches and trainer, on a CPU.

    python train_unsloth.py texts.json VERIFIER OUT --loss kl --lr 1e-3 --steps 100 --tokens 3072

Runs in unsloth's environment, unpatched, in fp32. A step has as many texts as are that many tokens long on average.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from datasets import Dataset
from training import print_cost, training_parser
from transformers import AutoModelForCausalLM, AutoTokenizer
from unsloth.models.speculative import MTPTrainingArguments, UnslothMTPTrainer, get_mtp_head

NO_TARGET = -100
LOSSES = {"ce": "ce", "kl": "kl_div"}


def as_row(text: dict[str, Any]) -> dict[str, list[int]]:
    pairs = zip(text["input_ids"], text["loss_mask"], strict=True)
    return {"input_ids": text["input_ids"], "labels": [one if kept else NO_TARGET for one, kept in pairs]}


def main() -> None:
    """Train, write the verifier with the trained head, and print the seconds as JSON."""
    parser = training_parser(__doc__)
    parser.add_argument("--loss", choices=LOSSES, default="ce")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    texts = json.loads(options.texts.read_text())
    texts = texts[: int(len(texts) * options.share)]
    model = AutoModelForCausalLM.from_pretrained(options.verifier, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.verifier)
    settings = MTPTrainingArguments(
        str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=round(options.tokens / statistics.fmean(len(one["input_ids"]) for one in texts)),
        learning_rate=options.lr,
        mtp_num_steps=options.depth,
        mtp_loss_type=LOSSES[options.loss],
        seed=options.seed,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = UnslothMTPTrainer(
        get_mtp_head(model),
        settings,
        target_model=model,
        train_dataset=Dataset.from_list(list(map(as_row, texts))),
        processing_class=tokenizer,
    )
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    model.save_pretrained(options.out / "stitched")
    tokenizer.save_pretrained(options.out / "stitched")
    print_cost(options, seconds)


if __name__ == "__main__":
    main()
