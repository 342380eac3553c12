#!/usr/bin/env python
"""Compare decoding on a CPU with transformers' ``generate``, and time a step of head training.

    python inference/benchmarks/cpu.py                                  # the demo
    python inference/benchmarks/cpu.py --model CKPT --batches 1 --dtypes fp32
    python inference/benchmarks/cpu.py --model HEADLESS --head ngram    # no training step

Arms of a cell (dtype, batch) decode the same prompts greedily, to a fixed length, and take turns in every repeat. Their
time is the CPU time of the process from the second token on. Ratios are taken within a repeat. The last line of the
output is one JSON document.

Shapes: B rows, T tokens, K depths, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mtp_inference import HeadDrafting, Request, SpeculativeDecoder
from mtp_inference.opening import prompt_tokens
from mtp_train.data.pack import PackedBatch
from mtp_train.evaluation.suites import content_text, load_suite
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import TrunkStates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Texts = list[tuple[int, ...]]
Arm = Callable[[Sequence[Sequence[int]], int], Texts]
"""Decodes prompts of one length to a number of new tokens, and returns these."""
Row = dict[str, Any]


def now(device: torch.device) -> float:
    """Return a time in seconds: on a CPU the CPU time of this process, which others change little."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def machine() -> Row:
    """Return the names and versions that figures depend on."""
    listed, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if listed.is_file():
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {
        "processor": name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def prompts_of(tokenizer: PreTrainedTokenizerBase | None, suite: str, length: int, count: int) -> list[list[int]]:
    """Return the ends of a suite's prompts, all of one length."""
    if tokenizer is None:
        raise SystemExit("--model: no tokenizer; expected one beside the checkpoint. Save it there.")
    chat, found = bool(tokenizer.chat_template), []
    for one in load_suite(suite):
        ids = prompt_tokens(tokenizer, content_text(one.content), chat=chat, where=one.id)
        if len(ids) >= length:
            found.append(ids[-length:])
    if len(found) < count:
        raise SystemExit(
            f"--suite: {suite} has {len(found)} prompts of {length} tokens; expected {count}. Lower --prompt-tokens."
        )
    return found


@dataclass
class Ours:
    """Our decoder."""

    decoder: SpeculativeDecoder
    tau: float = 1.0
    """Mean tokens per round of the last call."""

    def __call__(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Texts:
        """Decode; see :data:`Arm`."""
        results = self.decoder.generate([Request(prompt_ids=ids, max_new_tokens=new_tokens) for ids in prompts])
        rounds = sum(one.rounds for one in results)
        self.tau = 1 + sum(one.num_accepted_tokens for one in results) / max(rounds, 1)
        return [one.token_ids for one in results]


def theirs(trunk: Trunk) -> Arm:
    """Return transformers' ``generate`` on the trunk that our decoder runs."""
    # generate would take stop tokens and sampling settings that ours leaves unset from the checkpoint's config.
    trunk.causal_lm.generation_config = GenerationConfig()

    @without_cudnn_attention()
    def run(prompts: Sequence[Sequence[int]], new_tokens: int) -> Texts:
        prompt_BT = torch.tensor(prompts, device=trunk.lm_head_VD.device)
        config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0)
        mask_BT = torch.ones_like(prompt_BT)
        output_BT = trunk.causal_lm.generate(prompt_BT, attention_mask=mask_BT, generation_config=config)
        return [tuple(row) for row in output_BT[:, prompt_BT.shape[1] :].tolist()]

    return run


def measure_arms(
    arms: Mapping[str, Arm], prompts: Sequence[Sequence[int]], batch: int, new_tokens: int, repeats: int, device: Any
) -> list[Row]:
    """Time all arms in turns; return a row for each, in the order of ``arms``.

    Args:
        arms: The arms by name; others are compared with the first and the last of them.
        prompts: Prompts of one length; each repeat decodes the next ones.
        batch: B.
        new_tokens: New tokens of every text, 2 or more.
        repeats: Timed repeats, after one that is not counted.
        device: Device of the trunk.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    texts: dict[str, Texts] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        group = [prompts[(repeat * batch + row) % len(prompts)] for row in range(batch)]
        for name, arm in arms.items():
            started = now(device)
            arm(group, 1)
            first = now(device)
            found = arm(group, new_tokens)
            ended = now(device)
            if repeat:
                seconds[name].append((ended - first) - (first - started))
                texts[name] += found
    num_tokens = batch * (new_tokens - 1)
    plain, last = next(iter(arms)), list(arms)[-1]
    return [
        {
            "batch": batch,
            "arm": name,
            "tokens_per_second": round(num_tokens / median(taken), 2),
            f"over_{plain}": paired(seconds[plain], taken),
            f"over_{last}": paired(seconds[last], taken),
            f"texts_of_{plain}": sum(one == other for one, other in zip(texts[name], texts[plain], strict=True)),
            "texts": len(texts[name]),
            "tau": round(arm.tau, 3) if isinstance(arm := arms[name], Ours) else None,
        }
        for name, taken in seconds.items()
    ]


def paired(slower: Sequence[float], faster: Sequence[float]) -> Row:
    """Return the median, the least and the most of the ratios within each repeat."""
    ratios = [one / other for one, other in zip(slower, faster, strict=True)]
    return {"median": round(median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}


ATTENTION = [operation for operation in flop_registry if "attention" in str(operation)]
"""Not counted: torch before 2.13 refuses grouped heads here, and not every kernel is registered."""


def documents(tokens: int, seq_len: int, vocab_size: int, device: torch.device) -> PackedBatch:
    """Return rows of random tokens, each one document."""
    shape = (tokens // seq_len, seq_len)
    return PackedBatch(
        torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device),
        torch.arange(seq_len, device=device).expand(shape),
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.ones(shape, dtype=torch.bool, device=device),
    )


def training_step(
    trunk: Trunk, drafting: HeadDrafting, dtype: torch.dtype, *, tokens: int, seq_len: int, depth: int, repeats: int
) -> Row:
    """Time a whole step of head training (trunk, head, loss, backward, AdamW) on random tokens.

    Args:
        trunk: The trunk, in any dtype.
        drafting: The head; converted to fp32, as heads are trained.
        dtype: Dtype of the matrix products.
        tokens: Tokens of the step, a multiple of ``seq_len``.
        seq_len: T.
        depth: K.
        repeats: Timed steps, after one that is not counted.
    """
    device = trunk.lm_head_VD.device
    batch = documents(tokens, seq_len, len(trunk.lm_head_VD), device)
    head = drafting.head.float().requires_grad_(True)
    module = HeadTraining(
        TrunkStates(trunk), head, num_depths=depth, kind="kl", temperature=1.0, compute_dtype=dtype
    ).train()
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-6)
    scale_K = torch.full((depth,), 1 / tokens, device=device)

    def step() -> float:
        total = module(MicroBatch(batch, scale_K)).total
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(total.detach())

    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(ATTENTION, lambda *_, **__: 0)) as counter:
        loss = step()
    taken = []
    for _ in range(repeats):
        started = now(device)
        step()
        taken.append(now(device) - started)
    return {
        "loss": round(loss, 4),
        "seconds": round(median(taken), 4),
        "tokens_per_second": round(tokens / median(taken), 1),
        "tflop": round(counter.get_total_flops() / 1e12, 4),
        "tflop_per_second": round(counter.get_total_flops() / 1e12 / median(taken), 4),
    }


def measure(options: argparse.Namespace, dtype: str) -> tuple[list[Row], Row | None]:
    """Return the rows of all batches in a dtype, and the training step; None for a drafter that is not trained."""
    device = torch.device("cpu")
    loaded = SpeculativeDecoder.from_pretrained(
        options.model, head=options.head, depth=options.depth, device=device, dtype=DTYPES[dtype]
    )
    trunk, rows = loaded.trunk, []
    prompts = prompts_of(loaded.tokenizer, options.suite, options.prompt_tokens, max(options.batches))
    for batch in options.batches:
        arms: dict[str, Arm] = {
            "plain": Ours(SpeculativeDecoder(trunk, None, 0, eos_ids=(), max_batch=batch)),
            "speculative": Ours(SpeculativeDecoder(trunk, loaded.drafting, options.depth, (), max_batch=batch)),
            "transformers": theirs(trunk),
        }
        found = measure_arms(arms, prompts, batch, options.new_tokens, options.repeats, device)
        rows += [{"dtype": dtype, **row} for row in found]
        print(*rows[-len(arms) :], sep="\n", flush=True)
    if not isinstance(loaded.drafting, HeadDrafting):
        return rows, None
    sizes = {"tokens": options.train_tokens, "seq_len": options.seq_len, "depth": options.depth}
    step = training_step(trunk, loaded.drafting, DTYPES[dtype], **sizes, repeats=options.repeats)
    print({"dtype": dtype, "training step": step}, flush=True)
    return rows, step


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:base", help="checkpoint; default: demo:base")
    parser.add_argument("--head", help="drafter, as of generate; default: the checkpoint's own head")
    parser.add_argument("--suite", help="prompts; default: demo for the demo, else builtin")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES), help="default: fp32,bf16")
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="default: 1,8")
    for name, default in (
        ("depth", 3),
        ("prompt-tokens", 32),
        ("new-tokens", 64),
        ("repeats", 5),
        ("train-tokens", 1024),
        ("seq-len", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args(argv)
    if unknown := set(options.dtypes) - set(DTYPES):
        parser.error(f"--dtypes: {', '.join(sorted(unknown))}; expected {', '.join(DTYPES)}")
    if min(options.new_tokens - 1, options.depth, options.repeats, *options.batches) < 1:
        parser.error("expected --new-tokens of 2 or more, and 1 or more of the others")
    if options.train_tokens % options.seq_len or not options.train_tokens:
        parser.error(f"--train-tokens: {options.train_tokens}; expected a multiple of --seq-len")
    options.suite = options.suite or ("demo" if options.model.startswith("demo:") else "builtin")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cells; print each as it is done, and everything as JSON in the last line."""
    options = parse(argv)
    settings = {**vars(options), **machine()}
    print(settings, flush=True)
    decoding: list[Row] = []
    training: dict[str, Row | None] = {}
    for dtype in options.dtypes:
        rows, training[dtype] = measure(options, dtype)
        decoding += rows
    print(json.dumps({"settings": settings, "decoding": decoding, "training": training}))


if __name__ == "__main__":
    main()
