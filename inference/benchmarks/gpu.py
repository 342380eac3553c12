#!/usr/bin/env python
"""Test and measure on a GPU: what a first run there has to show, in a few minutes.

    python inference/benchmarks/gpu.py                    # the demo
    python inference/benchmarks/gpu.py --model CKPT       # a checkpoint with a head, in bf16
    python inference/benchmarks/gpu.py --parts decode,train --config config.json    # random weights of that shape
    python inference/benchmarks/gpu.py --parts rounds,decode

Parts: ``imports`` imports every module. ``rounds`` compares captured with eager rounds. ``decode`` times depths 0 and 3
at batch 1. ``train`` times one step of head training. ``demo`` runs the demo's recipe. A part that fails does not end
the others. The last line of the output is one JSON document; the exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu import Row, machine, now, prompts_of, training_step
from transformers import AutoConfig, AutoModelForCausalLM

import mtp_inference
import mtp_train
from mtp_inference import HeadDrafting, Request, Sampling, SpeculativeDecoder, compare, fault_of
from mtp_train.families.registry import family_for
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk

DEPTHS = (0, 3)
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=1)


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
    """The parts.

    Args:
        options: The options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self._loaded: dict[torch.dtype, SpeculativeDecoder] = {}

    def loaded(self, dtype: torch.dtype) -> SpeculativeDecoder:
        """Return the model with its head, loaded once for each dtype."""
        if dtype not in self._loaded and self.options.config:
            self._loaded[dtype] = random_model(self.options.config, self.device, dtype)
        if dtype not in self._loaded:
            self._loaded[dtype] = SpeculativeDecoder.from_pretrained(
                self.options.model, depth=max(DEPTHS), device=self.device, dtype=dtype
            )
        return self._loaded[dtype]

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts of 32 tokens, random ones for random weights."""
        if self.options.config:
            vocab_size = len(self.loaded(torch.bfloat16).trunk.lm_head_VD)
            return torch.randint(vocab_size, (count, 32), generator=torch.Generator().manual_seed(0)).tolist()
        suite = "demo" if self.options.model.startswith("demo:") else "builtin"
        return prompts_of(self.loaded(torch.bfloat16).tokenizer, suite, 32, count)[:count]

    def imports(self) -> Row:
        """Import every module of both packages."""
        found = [
            importlib.import_module(module.name).__name__
            for package in (mtp_train, mtp_inference)
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
            if not module.name.endswith("__main__")
        ]
        return {"modules": len(found)}

    def rounds(self) -> Row:
        """Compare texts of captured and of eager rounds, greedy and sampled, at every depth.

        Raises:
            RuntimeError: A text differs by more than rounding, or no round was captured.
        """
        found: Row = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = self.loaded(dtype)
            for depth in DEPTHS:
                requests = [
                    Request(prompt_ids=ids[row:], max_new_tokens=self.options.new_tokens, sampling=sampling)
                    for row, ids in enumerate(self.prompts(3))
                    for sampling in (Sampling(), SAMPLED)
                ]
                captured, eager = (
                    SpeculativeDecoder(
                        model.trunk,
                        model.drafting if depth else None,
                        depth,
                        (),
                        max_batch=4,
                        captures=captures,
                        records=True,
                    )
                    for captures in (True, False)
                )
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    results = captured.generate(requests), eager.generate(requests)
                failures = [str(one.message) for one in caught if "cannot be captured" in str(one.message)]
                if failures or (captured.captured_rounds == 0 and self.device.type == "cuda"):
                    raise RuntimeError(f"depth {depth}, {dtype}: {failures or 'no graph'}; expected captured rounds")
                same = sum(one.token_ids == other.token_ids for one, other in zip(*results, strict=True))
                if fault := fault_of(compare(*results, model.trunk)):
                    raise RuntimeError(f"depth {depth}, {dtype}: {fault}; expected the eager texts")
                found[f"{dtype}, depth {depth}"] = {
                    "same": same,
                    "texts": len(requests),
                    "graphs": captured.captured_rounds,
                }
        return found

    def decode(self) -> Row:
        """Time decoding of one text at every depth, in bf16, in turns."""
        model, found = self.loaded(torch.bfloat16), {}
        decoders = {
            depth: SpeculativeDecoder(model.trunk, model.drafting if depth else None, depth, (), max_batch=1)
            for depth in DEPTHS
        }
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
        """Time one step of head training, in bf16.

        Raises:
            RuntimeError: The checkpoint's drafter is not a head.
        """
        model = self.loaded(torch.bfloat16)
        if not isinstance(model.drafting, HeadDrafting):
            raise RuntimeError("--model: a drafter that is not a head; expected a checkpoint with an MTP head")
        sizes = {"tokens": self.options.train_tokens, "seq_len": self.options.seq_len}
        found = training_step(
            model.trunk, model.drafting, torch.bfloat16, **sizes, depth=max(DEPTHS), repeats=self.options.repeats
        )
        # The step leaves the head in fp32.
        self._loaded.clear()
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {**found, "peak_bytes": memory}

    def demo(self) -> Row:
        """Run the demo's recipe to its end.

        Raises:
            RuntimeError: The run failed.
        """
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            words = [sys.executable, "-m", "mtp_train", "run", "retrain_head", f"run_dir={run}", *self.options.fields]
            started = time.perf_counter()
            done = subprocess.run(words, stdout=sys.stderr, check=False)
            outcome = json.loads((run / "outcome.json").read_text()) if (run / "outcome.json").is_file() else {}
            if done.returncode not in (0, 3):
                raise RuntimeError(f"exit status {done.returncode}, {outcome}; expected 0, or 3 of the gate")
            arms = json.loads((run / "report.json").read_text())["arms"]
            taus = {name: arm["tau"] for name, arm in arms.items()}
            return {"seconds": round(time.perf_counter() - started, 1), "outcome": outcome, "tau": taus}


PARTS: dict[str, Callable[[Bench], Row]] = {
    "imports": Bench.imports,
    "rounds": Bench.rounds,
    "decode": Bench.decode,
    "train": Bench.train,
    "demo": Bench.demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:base", help="checkpoint with a head; default: demo:base")
    parser.add_argument("--config", help="config.json of a model with a head: random weights of its shape, in bf16")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--device", default="cuda", help="default: cuda; cpu tries the parts without a GPU")
    for name, default in (("new-tokens", 128), ("repeats", 5), ("train-tokens", 8192), ("seq-len", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="fields of the demo's recipe")
    options = parser.parse_args(argv)
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch detects no GPU; expected one. Run on a machine with a GPU and a torch built for it.")
    bench, found, failed = Bench(options), {}, False
    settings = {**vars(options), **machine()}
    if options.device == "cuda":
        settings |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    print(settings, flush=True)
    for part in options.parts.split(","):
        started = now(bench.device)
        try:
            found[part] = PARTS[part](bench)
        # Whatever a device makes of a part, the others still run.
        except Exception as error:
            traceback.print_exc()
            found[part], failed = {"failed": f"{type(error).__name__}: {error}"}, True
        print(part, found[part], f"{now(bench.device) - started:.1f} s", flush=True)
    print(json.dumps({"settings": settings, "parts": found}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
