#!/usr/bin/env python
"""Train a head with speculators' own model, loss, batches, optimizer and schedule, on a CPU.

    python train_speculators.py texts.json VERIFIER OUT --lr 1e-3 --steps 100 --tokens 3072 --states before_norm
    python train_speculators.py texts.json VERIFIER OUT --lr 7e-4 --steps 100 --tokens 2048 --draft-vocab 8192

The verifier's native MTP head, or with ``--draft-vocab`` a new EAGLE-3 head. Runs in speculators' environment. Its
trainer moves tensors to the number of a GPU, and waits for it; here it trains on the CPU, in fp32. The verifier's
states are transformers' and not a server's: of the last layer, as vLLM's server gives them to speculators
(``before_norm``), or after the final norm, as engines give them to an MTP head. EAGLE-3 reads three further layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.cli.stitch import stitch
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.mtp.data import shift_batch_mtp
from speculators.models.utils import get_verifier_config
from speculators.train.cli import create_transformer_layer_config
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from training import print_cost, training_parser
from transformers import AutoModelForCausalLM

DTYPE = torch.float32


class CpuTrainer(Trainer):
    """speculators' trainer on a CPU."""

    local_rank = property(lambda self: torch.device("cpu"), lambda self, _number: None)
    device_type = property(lambda self: "cpu", lambda self, _name: None)


def mtp_model(options: argparse.Namespace) -> MTPDraftModel:
    """Return the verifier's native head."""
    place = str(options.verifier)
    config = get_verifier_config(place)
    return MTPDraftModel.from_training_args(config, num_speculative_steps=options.depth, verifier_name_or_path=place)


def eagle3_model(options: argparse.Namespace, texts: list[dict[str, Any]]) -> Eagle3DraftModel:
    """Return a new EAGLE-3 head with speculators' defaults, which drafts the answers' most frequent tokens."""
    layer = create_transformer_layer_config(
        verifier_name_or_path=str(options.verifier),
        num_layers=1,
        draft_arch="llama",
        hidden_act="silu",
        sliding_window=2048,
        full_attention_indices=[0],
    )
    answers = Counter(
        token
        for text in texts
        for token, is_answer in zip(text["input_ids"], text["loss_mask"], strict=True)
        if is_answer
    )
    d2t, t2d = build_vocab_mappings_from_distribution(dict(answers), options.draft_vocab, layer.vocab_size)
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d,
        d2t,
        draft_vocab_size=options.draft_vocab,
        norm_before_residual=True,
        ttt_steps=options.depth,
        verifier_name_or_path=str(options.verifier),
        # Its default needs a GPU to train.
        draft_attn_impl="sdpa",
    )


@torch.inference_mode()
def write_states(texts: list[dict[str, Any]], verifier: Path, data: Path, states: str, layers: list[int]) -> None:
    """Write texts and the verifier's states in the files of ``speculators prepare-data`` and of its server.

    Args:
        layers: Layers whose inputs are written before the last states.
    """
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
        inputs = model(ids_T[None], logits_to_keep=1, output_hidden_states=True).hidden_states
        states_TLD = torch.stack([*(inputs[layer][0] for layer in layers), seen[states][0]], dim=1)
        file = data / "hidden_states" / f"hs_{number}.safetensors"
        save_file({"token_ids": ids_T, "hidden_states": states_TLD}, file)


def main() -> None:
    """Train, write the verifier with the trained head or the new head, and print the seconds as JSON."""
    parser = training_parser(__doc__)
    parser.add_argument("--states", choices=("before_norm", "after_norm"), default="before_norm")
    parser.add_argument("--draft-vocab", type=int, help="train a new EAGLE-3 head that drafts so many tokens")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True)
    texts = json.loads(options.texts.read_text())
    if options.draft_vocab:
        model, preprocess = eagle3_model(options, texts), shift_batch
        # Its default implementation of the loss needs a GPU.
        loss = {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_step_loss_decay": 1.0}
        layers, steps = model.target_layer_ids, {**loss, "ttt_steps": options.depth}
    else:
        model, preprocess = mtp_model(options), shift_batch_mtp
        layers, steps = [], {"num_speculative_steps": options.depth}
    write_states(texts, options.verifier, options.out / "data", options.states, layers)
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
        hidden_size=get_verifier_config(str(options.verifier)).hidden_size,
        num_target_layers=len(layers) or 1,
        num_workers=0,
        prefetch_factor=0,
        preprocess=preprocess,
        train_data_ratio=options.share,
        seed=options.seed,
    )
    kwargs = type(model).get_trainer_kwargs(**steps)
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
    trained = options.out / "checkpoints" / str(max(epochs))
    if options.draft_vocab:
        trained.rename(options.out / "draft")
    else:
        stitch(trained, options.verifier, options.out / "stitched")
    print_cost(options, seconds)


if __name__ == "__main__":
    main()
