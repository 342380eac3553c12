#!/usr/bin/env python
"""Train a native MTP head with speculators' own model, loss, batches, optimizer and schedule, on a CPU.

    python train_speculators.py texts.json VERIFIER OUT --lr 1e-3 --steps 100 --tokens 3072 --states before_norm

Runs in speculators' environment. Its trainer moves tensors to the number of a GPU, and waits for it; here it trains on
the CPU, in fp32. The verifier's states are transformers' and not a server's: of the last layer, as vLLM's server gives
them to speculators (``before_norm``), or after the final norm, as engines give them to the head.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.cli.stitch import stitch
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.mtp.data import shift_batch_mtp
from speculators.models.utils import get_verifier_config
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from training import print_cost, training_parser
from transformers import AutoModelForCausalLM

DTYPE = torch.float32


class CpuTrainer(Trainer):
    """speculators' trainer on a CPU."""

    local_rank = property(lambda self: torch.device("cpu"), lambda self, _number: None)
    device_type = property(lambda self: "cpu", lambda self, _name: None)


@torch.inference_mode()
def write_states(texts: list[dict[str, Any]], verifier: Path, data: Path, states: str) -> None:
    """Write texts and the verifier's states in the files of ``speculators prepare-data`` and of its server."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=DTYPE).eval()
    rows = [{**text, "seq_len": len(text["input_ids"])} for text in texts]
    Dataset.from_list(rows).with_format("torch").save_to_disk(data)
    seen: dict[str, torch.Tensor] = {}

    def keep(_norm: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen.update(before_norm=inputs[0], after_norm=output)

    model.model.norm.register_forward_hook(keep)
    (data / "hidden_states").mkdir()
    for number, text in enumerate(texts):
        ids_T = torch.tensor(text["input_ids"])
        model(ids_T[None], logits_to_keep=1)
        states_T1D = seen[states][0][:, None].contiguous()
        file = data / "hidden_states" / f"hs_{number}.safetensors"
        save_file({"token_ids": ids_T, "hidden_states": states_T1D}, file)


def main() -> None:
    """Train, write the verifier with the trained head, and print the seconds as JSON."""
    parser = training_parser(__doc__)
    parser.add_argument("--states", choices=("before_norm", "after_norm"), default="before_norm")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True)
    texts = json.loads(options.texts.read_text())
    write_states(texts, options.verifier, options.out / "data", options.states)
    config = get_verifier_config(str(options.verifier))
    model = MTPDraftModel.from_training_args(
        config, num_speculative_steps=options.depth, verifier_name_or_path=str(options.verifier)
    )
    loaders = create_train_val_loaders(
        data_path=str(options.out / "data"),
        total_seq_len=options.tokens,
        hidden_states_dtype=DTYPE,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=str(options.verifier),
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=config.hidden_size,
        num_target_layers=1,
        num_workers=0,
        prefetch_factor=0,
        preprocess=shift_batch_mtp,
        train_data_ratio=options.share,
        seed=options.seed,
    )
    kwargs = MTPDraftModel.get_trainer_kwargs(num_speculative_steps=options.depth)
    settings = TrainerConfig(
        lr=options.lr,
        num_epochs=-(-options.steps // len(loaders[0])),
        save_path=str(options.out / "checkpoints"),
        train_call_kwargs=kwargs[0],
        val_call_kwargs=kwargs[1],
        scheduler_total_steps=options.steps,
        hidden_states_dtype=DTYPE,
        max_steps=options.steps,
    )
    torch.accelerator.synchronize = lambda *_unused: None
    started = time.process_time()
    CpuTrainer(model, settings, *loaders).run_training()
    seconds = time.process_time() - started
    epochs = [int(one.name) for one in (options.out / "checkpoints").iterdir() if one.name.isdigit()]
    stitch(options.out / "checkpoints" / str(max(epochs)), options.verifier, options.out / "stitched")
    print_cost(options, seconds)


if __name__ == "__main__":
    main()
