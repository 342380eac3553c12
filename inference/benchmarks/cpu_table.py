#!/usr/bin/env python
"""Compare decoding on one CPU thread with transformers and llama.cpp, and ``auto`` with plain decoding.

    python inference/benchmarks/cpu_table.py --llama-batched-bench PATH --out inference/benchmarks/cpu

Figures are tokens per second of the process's CPU time: medians over repeats in which the arms take turns, with their
range. Ratios are taken within a repeat. Prefill does not count, except with ``auto``. Decoding is greedy, and no token
ends a text.

- Qwen3.5-shaped models of random weights decode in fp32, and in bf16 where the CPU multiplies bf16 natively: one of 64
  million weights at batch 1 and 8, and one of 570 million at batch 1. A draft is right with a set probability
  (``ACCEPTANCE``); its cost is the head's.
- A tiny GLM, trained here with its head, drafts for itself in our decoder and in transformers (``use_mtp=True``).
- ``auto`` decodes eight texts of different lengths, of which some or all accept no draft.

llama.cpp reads a file of the same model in fp32 that this program writes, without a vocabulary. It expects the value
heads of recurrent layers in another order, so it computes another text, in the same time: time does not depend on
values. A peer that is not installed is left out, and ``skipped`` has the reason.

Prints a table, and last one line of JSON.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import torch
import transformers
from torch import Tensor

from mtp_inference import Request, SpeculativeDecoder
from mtp_inference.bench.clock import take_turns, worked
from mtp_inference.bench.machine import cpu_facts
from mtp_inference.bench.measurements import (
    Arm,
    Plan,
    Row,
    Run,
    SetAcceptance,
    measure_decoding,
    paired_ratios,
)
from mtp_inference.bench.output import finish, markdown
from mtp_inference.bench.subject import Subject, shape_subject, trained_subject
from mtp_inference.bench.texts import Group, Prompts
from mtp_inference.requests import MtpMode
from mtp_train.gguf.fields import NUM_MODULES
from mtp_train.gguf.head_record import GgufHead
from mtp_train.gguf.model_types import GGUF_HEADS
from mtp_train.gguf.sidecar import add_value
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import bf16_support

CPU = torch.device("cpu")
ACCEPTANCE = 0.8
DEPTHS = (0, 1, 2, 3)
GLM_DEPTHS = (0, 1, 2, 3, 5, 7)
"""Nearly every draft of the trained model is right, so that deep drafts pay."""
SPEEDS = "tokens_per_second_by_repeat"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNKNOWN_TOKEN = -1
RECURRENT = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
"""Parameter of a recurrent layer to llama.cpp's name. The head's record has the names of the other layers."""


class Sizes(NamedTuple):
    """Sizes of the measurements."""

    batches: Mapping[str, Sequence[int]] = MappingProxyType({"64m": (1, 8), "570m": (1,)})
    """Shape to its batch sizes. ``auto`` decodes with the first shape."""
    prompt_tokens: int = 32
    new_tokens: int = 49
    ragged_tokens: int = 128
    train_steps: int = 200
    repeats: int = 5
    ragged_repeats: int = 9
    """The goal of ``auto`` is nearer to plain decoding than two repeats are to each other."""


SMALL = Sizes({"tiny-qwen": (1, 8)}, 2, 3, 4, 1, 1, 1)
RAGGED: Mapping[str, Sequence[float]] = {
    "no row accepts": (0.0,) * 8,
    "one row accepts nothing": (0.0, *(ACCEPTANCE,) * 7),
    "half accept nothing": (0.0, ACCEPTANCE) * 4,
}
"""Cell to the probability that a draft of each row is right."""


class LlamaCppArm:
    """Plain decoding by llama.cpp in one thread, timed by the CPU time of its process.

    The time of one new token, with loading and prompt, is measured apart and subtracted as prefill.

    Args:
        program: Path of ``llama-batched-bench``.
        model: A file of :func:`write_trunk`.
    """

    name = "llama.cpp"
    depth: int | None = None

    def __init__(self, program: Path, model: Path) -> None:
        self.program = program
        self.model = model

    def run(self, group: Group, new_tokens: int) -> Run:
        """Decode as many random prompts of the same length. The texts are not known."""
        first, whole = (self._cpu_seconds(len(group), len(group[0]), count) for count in (1, new_tokens))
        return Run(first, whole, [(UNKNOWN_TOKEN,) * new_tokens] * len(group))

    def _cpu_seconds(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        # The program skips sizes that do not fit into its cache, whose size is rounded down for each text.
        room = 2 * batch * (prompt_tokens + new_tokens)
        sizes = {"-npp": prompt_tokens, "-ntg": new_tokens, "-npl": batch, "-c": room}
        asked = [str(word) for pair in sizes.items() for word in pair]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Its own times are the clock's, and its last line of output is sometimes lost in a pipe.
        subprocess.run(
            [str(self.program), "-m", str(self.model), "-t", "1", "-tb", "1", *asked], check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def llama_cpp_version(program: Path) -> str:
    """Return the line in which llama.cpp's programs state their version."""
    printed = subprocess.run([str(program), "--version"], check=True, capture_output=True, text=True)
    lines = (printed.stdout + printed.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version: ")), "unknown")


def write_trunk(path: Path, trunk: Trunk) -> None:
    """Write a Qwen3.5 trunk as a GGUF file in fp32.

    Args:
        path: The new file.
        trunk: The trunk.
    """
    config = trunk.config.to_dict()
    record = GGUF_HEADS[config["model_type"]]
    writer = gguf.GGUFWriter(path, record.arch)
    writer.add_block_count(config["num_hidden_layers"])
    for name, field in record.fields.items():
        value = field({**config, NUM_MODULES: 0})
        if value is not None:
            add_value(writer, f"{record.arch}.{name}", value)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    # Tokens are numbers: no vocabulary is needed.
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in trunk_tensors(trunk, record):
        writer.add_tensor(name, tensor.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def trunk_tensors(trunk: Trunk, record: GgufHead) -> Iterator[tuple[str, Tensor]]:
    """Yield the trunk's tensors with llama.cpp's names and conventions.

    Args:
        trunk: The trunk.
        record: The record of its heads, whose layers have the same names.
    """
    yield "token_embd.weight", trunk.causal_lm.get_input_embeddings().weight
    yield "output_norm.weight", trunk.decoder.norm.weight + record.norm_offset
    yield "output.weight", trunk.lm_head_VD
    names = {**record.names, **RECURRENT}
    for index, layer in enumerate(trunk.layers):
        for key, value in layer.named_parameters():
            yield f"blk.{index}.{names[key]}", _converted(key, value, record.norm_offset)


def _converted(key: str, value: Tensor, norm_offset: float) -> Tensor:
    if key.endswith("A_log"):
        return -torch.exp(value)
    if key.endswith("conv1d.weight"):
        return value.squeeze(1)
    # The norm inside a recurrent layer multiplies by its weight itself.
    if key.endswith("norm.weight") and key not in RECURRENT:
        return value + norm_offset
    return value


def plan_of(sizes: Sizes, acceptance: float | None, depths: tuple[int, ...], batches: Sequence[int]) -> Plan:
    """Return the settings of the cells of one model."""
    return Plan(
        depths=depths,
        batches=tuple(batches),
        prompt_lengths=(sizes.prompt_tokens,),
        new_tokens=sizes.new_tokens,
        repeats=sizes.repeats,
        acceptance=acceptance,
        against_transformers=True,
        prefill=False,
        seed=0,
        clock=worked,
    )


def decode_cells(subject: Subject, shape: str, precision: str, sizes: Sizes, others: Sequence[Arm]) -> list[Row]:
    """Measure a shape at its batch sizes, with forced drafts."""
    plan = plan_of(sizes, ACCEPTANCE, DEPTHS, sizes.batches[shape])
    prompts = Prompts(None, subject.text, plan.seed)
    found = []
    for batch in plan.batches:
        rows = measure_decoding(subject, plan, prompts, batch, sizes.prompt_tokens, _nothing, others)
        found += [_brief(row, shape, precision) for row in rows]
    return found


def use_mtp_cells(sizes: Sizes) -> list[Row]:
    """Measure a trained tiny GLM at batch 1, with its own drafts."""
    subject = trained_subject("tiny-glm", sizes.train_steps, device=CPU, seed=0, on_step=_nothing)
    plan = plan_of(sizes, None, GLM_DEPTHS, (1,))
    prompts = Prompts(None, subject.text, plan.seed)
    rows = measure_decoding(subject, plan, prompts, 1, sizes.prompt_tokens, _nothing)
    return [_brief(row, "tiny-glm", "fp32") for row in rows]


def _nothing() -> None:
    """Show no progress."""


def _brief(row: Row, model: str, precision: str) -> Row:
    kept = {name: row[name] for name in ("batch", "arm", "depth", "tau")}
    return {"model": model, "precision": precision, **kept, SPEEDS: [round(one, 2) for one in row[SPEEDS]]}


def ragged_cells(subject: Subject, shape: str, sizes: Sizes) -> list[Row]:
    """Measure ``auto`` against plain decoding of eight texts of different lengths."""
    found = []
    for cell, chances in RAGGED.items():
        jobs, num_tokens = _ragged_jobs(subject, chances, sizes)
        taken = take_turns(jobs, sizes.ragged_repeats, CPU)
        speeds = {name: [round(num_tokens / one, 2) for one in seconds] for name, seconds in taken.items()}
        found.append({"model": shape, "cell": cell, "batch": len(chances), **speeds})
    return found


def _ragged_jobs(
    subject: Subject, chances: Sequence[float], sizes: Sizes
) -> tuple[dict[str, Callable[[], object]], int]:
    """Return plain decoding and ``auto`` on the same requests, and their number of new tokens."""
    batch, longest, depth = len(chances), sizes.ragged_tokens, max(DEPTHS)
    (prompts,) = Prompts(None, subject.text, 0).groups(batch, sizes.prompt_tokens)
    limits = [longest if row % 3 else longest // 2 for row in range(batch)]
    if subject.drafting is None:
        raise SystemExit("no head: expected a subject with one")
    forced = SetAcceptance(
        subject.drafting,
        chances,
        num_rows=batch,
        num_positions=sizes.prompt_tokens + longest + depth + 1,
        vocab_size=len(subject.trunk.lm_head_VD),
        device=CPU,
        seed=0,
    )
    plain = SpeculativeDecoder(subject.trunk, None, 0, eos_ids=(), max_batch=batch)
    texts = plain.decode([Request(prompt_ids=ids, max_new_tokens=longest + depth + 1) for ids in prompts])
    forced.expect([[*ids, *text.token_ids] for ids, text in zip(prompts, texts, strict=True)])
    drafting = SpeculativeDecoder(subject.trunk, forced, depth, eos_ids=(), max_batch=batch)

    def job(decoder: SpeculativeDecoder, mtp: MtpMode) -> Callable[[], object]:
        requests = [
            Request(prompt_ids=ids, max_new_tokens=limit, mtp=mtp) for ids, limit in zip(prompts, limits, strict=True)
        ]
        return lambda: decoder.decode(requests)

    return {"plain": job(plain, "off"), "auto": job(drafting, "auto")}, sum(limits)


def ratios(decoding: Sequence[Row], ragged: Sequence[Row]) -> list[Row]:
    """Return the ratios that have a goal, where both arms were measured."""

    def speeds(model: str, precision: str, batch: int, arm: str, depth: int | None = None) -> list[float] | None:
        wanted = model, precision, batch, arm, depth
        names = ("model", "precision", "batch", "arm", "depth")
        return next((row[SPEEDS] for row in decoding if tuple(row[name] for name in names) == wanted), None)

    cells = list(dict.fromkeys((row["model"], row["precision"], row["batch"]) for row in decoding))
    pairs = []
    for cell in cells:
        model, precision, batch = cell
        if model == "tiny-glm":
            names = [(f"tiny-glm, depth {depth} / use_mtp", depth) for depth in GLM_DEPTHS[1:]]
            pairs += [(name, 1.5, cell, "transformers use_mtp", depth) for name, depth in names]
            continue
        where = f"{model}, {precision}, batch {batch}"
        pairs.append((f"plain / transformers, {where}", 1.2, cell, "transformers", 0))
        pairs.append((f"plain / llama.cpp, {where}", 0.8, cell, "llama.cpp", 0))
    found = []
    for name, goal, cell, theirs, depth in pairs:
        above, below = speeds(*cell, "ours", depth), speeds(*cell, theirs)
        if above is not None and below is not None:
            found.append(_ratio(name, goal, above, below))
    for row in ragged:
        found.append(_ratio(f"auto / plain, {row['cell']}", 0.97, row["auto"], row["plain"]))
    return found


def _ratio(name: str, goal: float, above: Sequence[float], below: Sequence[float]) -> Row:
    found = {key: round(value, 3) for key, value in paired_ratios(above, below)._asdict().items()}
    return {"ratio": name, **found, "goal": goal, "met": found["median"] >= goal}


def measure(sizes: Sizes, llama_batched_bench: Path | None) -> dict[str, Any]:
    """Return all cells and ratios, and the reason for each peer that was left out."""
    torch.set_num_threads(1)
    skipped: dict[str, str] = {}
    native, reason = bf16_support(CPU)
    if not native:
        skipped["bf16"] = reason
    if llama_batched_bench is None:
        skipped["llama.cpp"] = "no --llama-batched-bench"
    decoding: list[Row] = []
    ragged: list[Row] = []
    for shape, (precision, dtype) in product(sizes.batches, DTYPES.items()):
        if precision in skipped:
            continue
        subject = shape_subject(shape, dtype=dtype, device=CPU, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            others: list[Arm] = []
            if llama_batched_bench is not None and precision == "fp32":
                write_trunk(Path(folder) / "trunk.gguf", subject.trunk)
                others.append(LlamaCppArm(llama_batched_bench, Path(folder) / "trunk.gguf"))
            decoding += decode_cells(subject, shape, precision, sizes, others)
        if precision == "fp32" and not ragged:
            ragged = ragged_cells(subject, shape, sizes)
    decoding += use_mtp_cells(sizes)
    return {"decoding": decoding, "ragged": ragged, "ratios": ratios(decoding, ragged), "skipped": skipped}


def table(document: Mapping[str, Any]) -> str:
    """Return the tables of a document in Markdown."""
    speeds = []
    for row in document["decoding"]:
        arm = row["arm"] if row["depth"] is None else f"ours, depth {row['depth']}" if row["depth"] else "ours, plain"
        drafted = f"{row['tau']:.2f}" if row["depth"] else ""
        speeds.append([row["model"], row["precision"], row["batch"], arm, *_range(row[SPEEDS]), drafted])
    for row in document["ragged"]:
        for arm in ("plain", "auto"):
            cell = f"{row['batch']}, {row['cell']}"
            speeds.append([row["model"], "fp32", cell, f"ours, {arm}", *_range(row[arm]), ""])
    compared = []
    for row in document["ratios"]:
        spread = f"{row['least']:.2f} to {row['most']:.2f}"
        compared.append([row["ratio"], f"{row['median']:.2f}", spread, row["goal"], "yes" if row["met"] else "no"])
    return "\n\n".join(
        (
            markdown(("model", "precision", "batch", "decoder", "tokens/s", "range", "tau"), speeds),
            markdown(("ratio", "median", "range", "goal", "met"), compared),
        )
    )


def _range(speeds: Sequence[float]) -> tuple[str, str]:
    return f"{median(speeds):.1f}", f"{min(speeds):.1f} to {max(speeds):.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-batched-bench", type=Path, metavar="PATH", help="llama.cpp's program of this name")
    parser.add_argument("--small", action="store_true", help="a tiny model and one repeat, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for the JSON document, table.json")
    options = parser.parse_args(arguments)
    sizes = SMALL if options.small else Sizes()
    found = measure(sizes, options.llama_batched_bench)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if options.llama_batched_bench is not None:
        versions["llama.cpp"] = llama_cpp_version(options.llama_batched_bench)
    document = {
        "benchmark": "cpu table",
        "hardware": cpu_facts(),
        "versions": versions,
        "date": date.today().isoformat(),
        "sizes": sizes._asdict() | {"batches": dict(sizes.batches), "acceptance": ACCEPTANCE},
        **found,
    }
    print(table(document))
    for peer, reason in document["skipped"].items():
        print(f"skipped {peer}: {reason}")
    finish(document, options.out, "table.json")


if __name__ == "__main__":
    main()
