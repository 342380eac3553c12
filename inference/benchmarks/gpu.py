#!/usr/bin/env python
"""Test and measure on a GPU: what a first run there has to show, in a few minutes.

    python inference/benchmarks/gpu.py                    # the demo
    python inference/benchmarks/gpu.py --model CKPT       # a checkpoint with a head, in bf16
    python inference/benchmarks/gpu.py --parts decode,train --config config.json    # random weights of that shape

Parts: ``decode`` times depths 0 and 3 at batch 1. ``train`` times one step of head training on a document a row.
``published`` repeats these two three times. ``machine``: versions, launches, copies, products. ``profile``: the kernels
of rounds and the gaps between them. ``contexts``: context, batch and depth. ``step``: the step of a run, its changes,
memory beside the plan, and the hidden cache. ``offload``: layers in main memory.

A part or a cell that fails does not end the others. Every line of the output is one JSON document with all results so
far; the exit status is 1 if anything failed. ``scripts/measure_gpu.sh`` runs each part in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu import Row, machine, prompts_of, training_step
from gpu_kernels import machine as machine_cells, peak_bytes, profiled, streamed
from gpu_training import Steps, offloaded, uncompiled
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_inference import HeadDrafting, Request, SpeculativeDecoder
from mtp_train.checkpoints.demo import resolve
from mtp_train.families.registry import family_for
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk

DEPTHS = (0, 3)


def random_model(config: str, device: torch.device, dtype: torch.dtype) -> SpeculativeDecoder:
    """Return a decoder whose trunk and head have random weights, of the shape that a checkpoint's config gives.

    Its drafts are not accepted: what it shows is the time of a round and of a training step.
    """
    loaded = AutoConfig.from_pretrained(config)
    family = family_for(loaded.to_dict(), where=config)
    text = loaded.get_text_config()
    text.dtype = dtype
    with device:
        model = AutoModelForCausalLM.from_config(text, dtype=dtype).requires_grad_(False).eval()
        trunk = Trunk(model, family)
        head = MtpHead(family, trunk.config, num_modules=1, convention=family.wiring.default)
        for parameter in head.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=text.initializer_range)
    return SpeculativeDecoder(trunk, HeadDrafting(head.to(device, dtype).eval()), max(DEPTHS), ())


def bytes_read(trunk: Trunk) -> int | None:
    """Return the bytes of weights that a round of one text reads; None for experts, of which it reads a part.

    Of an embedding a round looks up a few rows. An lm_head is read whole, also one that is the embedding's own matrix.
    """
    if any(".experts." in name for name, _ in trunk.named_parameters()):
        return None
    looked_up = {module.weight for module in trunk.modules() if isinstance(module, torch.nn.Embedding)}
    looked_up.discard(trunk.causal_lm.get_output_embeddings().weight)
    return sum(one.nbytes for one in trunk.parameters() if one not in looked_up)


class Bench:
    """A part, with the model that it loads.

    Args:
        options: The options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)

    @cached_property
    def model(self) -> SpeculativeDecoder:
        """The model with its head, in bf16."""
        if self.options.config:
            return random_model(self.options.config, self.device, torch.bfloat16)
        return SpeculativeDecoder.from_pretrained(
            self.options.model, depth=max(DEPTHS), device=self.device, dtype=torch.bfloat16
        )

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts of 32 tokens, random ones for random weights."""
        if self.options.config:
            vocab_size = len(self.model.trunk.lm_head_VD)
            return torch.randint(vocab_size, (count, 32), generator=torch.Generator().manual_seed(0)).tolist()
        suite = "demo" if self.options.model.startswith("demo:") else "builtin"
        return prompts_of(self.model.tokenizer, suite, 32, count)[:count]

    def decode(self) -> Row:
        """Time decoding of one text at every depth, in bf16, in turns."""
        model, found = self.model, {}
        decoders = {depth: self.decoder(depth, 1) for depth in DEPTHS}
        results: dict[int, list[Any]] = {depth: [] for depth in DEPTHS}
        for repeat, ids in enumerate(self.prompts(self.options.repeats + 1)):
            for depth, decoder in decoders.items():
                (result,) = decoder.generate([Request(prompt_ids=ids, max_new_tokens=self.options.new_tokens)])
                if repeat:
                    results[depth].append(result)
        num_bytes = bytes_read(model.trunk)
        for depth, runs in results.items():
            seconds = median(one.seconds_decode / one.rounds for one in runs)
            found[f"depth {depth}"] = {
                "tokens_per_second": round(median((len(one.token_ids) - 1) / one.seconds_decode for one in runs), 1),
                "tau": round(1 + sum(one.num_accepted_tokens for one in runs) / sum(one.rounds for one in runs), 3),
                "round_ms": round(1e3 * seconds, 3),
                "trunk_gb_per_second": num_bytes and round(num_bytes / seconds / 1e9, 1),
                "graphs": decoders[depth].captured_rounds,
            }
        return found

    def train(self) -> Row:
        """Time one step of head training, in bf16."""
        model = self.model
        sizes = {"tokens": self.options.train_tokens, "seq_len": self.options.seq_len}
        found = training_step(
            model.trunk, model.drafting, torch.bfloat16, **sizes, depth=max(DEPTHS), repeats=self.options.repeats
        )
        # The step leaves the head in fp32.
        del self.model
        return {**found, "peak_bytes": peak_bytes(self.device)}

    def published(self) -> Row:
        """Return cells that repeat ``decode`` and ``train`` three times."""
        return {f"{name} {number}": getattr(self, name) for number in (1, 2, 3) for name in ("decode", "train")}

    def machine(self) -> Row:
        """Return versions, and cells of what the device can do at best, with products of the model's shape."""
        path = self.options.config or resolve(self.options.model)
        text = AutoConfig.from_pretrained(path).get_text_config()
        return machine_cells(self.device, text.hidden_size, text.vocab_size)

    def decoder(self, depth: int, max_batch: int) -> SpeculativeDecoder:
        """Return a decoder of the model at a depth, which ends no text early."""
        drafting = self.model.drafting if depth else None
        return SpeculativeDecoder(self.model.trunk, drafting, depth, (), max_batch=max_batch)

    def profile(self) -> Row:
        """Return cells for the kernels of each depth's rounds, compiled and not."""
        request = Request(prompt_ids=self.prompts(1)[0], max_new_tokens=min(self.options.new_tokens, 32))

        def eager(depth: int) -> Row:
            with uncompiled():
                return profiled(self.decoder(depth, 1), request, self.device)

        found = {f"depth {one}": partial(profiled, self.decoder(one, 1), request, self.device) for one in DEPTHS}
        return {**found, **{f"depth {one}, nothing compiled": partial(eager, one) for one in DEPTHS}}

    def contexts(self) -> Row:
        """Return a cell for each context, batch and depth; the rows of a batch repeat one prompt."""
        (ids,) = self.prompts(1)

        def cell(context: int, batch: int, depth: int) -> Row:
            row = (ids * (context // len(ids) + 1))[:context]
            requests = [Request(prompt_ids=row, max_new_tokens=self.options.new_tokens)] * batch
            return streamed(self.decoder(depth, batch), requests, self.device)

        sizes = product(self.options.contexts, self.options.batches, DEPTHS)
        return {"context {}, batch {}, depth {}".format(*one): partial(cell, *one) for one in sizes}

    def step(self) -> Row:
        """Return cells for the step of a run, for each change of it, and for the hidden cache."""
        model, self.work = self.model, tempfile.TemporaryDirectory()
        sizes = {"tokens": self.options.train_tokens, "seq_len": self.options.seq_len, "repeats": self.options.repeats}
        return Steps(model.trunk, model.drafting, **sizes, depth=max(DEPTHS)).cells(Path(self.work.name))

    def offload(self) -> Row:
        """Time a forward pass whose layers are loaded from main memory."""
        return offloaded(self.model.trunk, self.device, self.options.seq_len)


PARTS: dict[str, Callable[[Bench], Row]] = {
    "decode": Bench.decode,
    "train": Bench.train,
    "published": Bench.published,
    "machine": Bench.machine,
    "profile": Bench.profile,
    "contexts": Bench.contexts,
    "step": Bench.step,
    "offload": Bench.offload,
}


def attempt(call: Callable[[], Row]) -> Row:
    """Return the row of a part or a cell, or its error: whatever a device makes of one, the others still run."""
    # Optimisers and decoders of earlier cells are garbage in cycles, which would count as peak memory.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:base", help="checkpoint with a head; default: demo:base")
    parser.add_argument("--config", help="config.json of a model with a head: random weights of its shape, in bf16")
    parser.add_argument("--parts", default="decode,train", help=f"of {', '.join(PARTS)}; default: decode,train")
    parser.add_argument("--device", default="cuda", help="default: cuda; cpu tries the parts without a GPU")
    for name, default in (("new-tokens", 128), ("repeats", 5), ("train-tokens", 8192), ("seq-len", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    for name, sizes in (("contexts", [1024, 32768]), ("batches", [1, 8, 32])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=sizes, help=f"default: {sizes}")
    options = parser.parse_args(argv)
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch detects no GPU; expected one. Run on a machine with a GPU and a torch built for it.")
    settings = {**vars(options), **machine()}
    if options.device == "cuda":
        settings |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    found: dict[str, Row] = {}
    for part in options.parts.split(","):
        cells = found[part] = attempt(partial(PARTS[part], Bench(options)))
        # Printed after each cell: what was measured before a time limit is in the last line.
        for name in list(cells) or [""]:
            if callable(cells.get(name)):
                cells[name] = attempt(cells[name])
            print(json.dumps({"settings": settings, "parts": found}, default=lambda _: "not reached"), flush=True)
    return int('"failed": ' in json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
