#!/usr/bin/env python
"""Train a native MTP head with unsloth's own head, loss, batches and trainer, on a CPU.

    python train_unsloth.py texts.json VERIFIER OUT --loss kl --lr 1e-3 --steps 100 --tokens 3072

Runs in unsloth's environment, unpatched, in fp32. A step has as many texts as are that many tokens long on average.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from unsloth.models.speculative import MTPTrainingArguments, UnslothMTPTrainer, get_mtp_head

NO_TARGET = -100
LOSSES = {"ce": "ce", "kl": "kl_div"}


def as_row(text: dict[str, Any]) -> dict[str, list[int]]:
    pairs = zip(text["input_ids"], text["loss_mask"], strict=True)
    return {"input_ids": text["input_ids"], "labels": [one if kept else NO_TARGET for one, kept in pairs]}


def main() -> None:
    """Train, write the verifier with the trained head, and print the seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--loss", choices=LOSSES, default="ce")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of a step")
    parser.add_argument("--share", type=float, required=True, help="of the texts to train on")
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu_seconds": round(seconds, 1), "peak_mib": round(peak), **vars(options)}, default=str))


if __name__ == "__main__":
    main()
