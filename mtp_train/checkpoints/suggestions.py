"""Build the hints of errors and reports: the command that the user should run next."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mtp_train.families.engines import quoted_json

PACKAGE = Path(__file__).parents[1]


def command(*words: object) -> str:
    """Return a command of this package, quoted for a shell."""
    return shlex.join(["mtp-train", *map(str, words)])


def graft_command(finetune: str, base: str) -> str:
    return command("graft", finetune, "--from", base, "--out", grafted_name(finetune))


def serve_as_it_is(checkpoint: str) -> str:
    """Return what to do with a checkpoint whose own head is the better one."""
    return f"serve {checkpoint} as it is"


def grafted_name(finetune: str) -> str:
    return output_of(finetune, "-mtp")


def evaluate_command(checkpoint: str, out: str) -> str:
    endpoint = ["--endpoint", "http://localhost:8000/v1", "--served-only"]
    return command("evaluate", checkpoint, *endpoint, "--out", out)


def judge_command(run_dir: Path) -> str:
    """Return the command that judges a run's export by the evaluations of its baseline and of the export."""
    arms = [f"stale={run_dir}-baseline", f"retrained={run_dir}-served"]
    return command("compare", *arms, "--judges", run_dir, "--out", f"{run_dir}-judged")


def draft_model_flag(path: str, depth: int) -> str:
    """Return vLLM's flag for drafting with a head in a directory of its own."""
    config = {"method": "mtp", "model": path, "num_speculative_tokens": depth}
    return f"--speculative-config {quoted_json(config)}"


def retrain_command(finetune: str, base: str, data: Sequence[str] = (), overrides: Sequence[str] = ()) -> str:
    """Return the command that retrains a head; without data, on the built-in prompts."""
    sources = ["--data", *data] if data else []
    sources += ["--set", *overrides] if overrides else []
    return command("rescue", finetune, "--from", base, *sources, "--out", output_of(finetune, "-rescued"))


def probe_command(finetune: str, base: str) -> str:
    """Return the command that measures what a head lost with the change of its trunk, and proposes what to do."""
    return command("probe", finetune, "--from", base)


def inspect_command(checkpoint: str, base: str | None = None) -> str:
    return command("inspect", checkpoint, *([] if base is None else ["--base", base]))


def output_of(location: str, ending: str) -> str:
    """Return the path of an output: beside a checkpoint, or here for one of the hub, of the package or of a cache."""
    path = Path(location.rpartition(":")[2])
    path = path if path.name.strip(".") else path.resolve()
    parts = Path(os.path.abspath(path)).parts
    is_cached = path.parent.name == "snapshots" or any(part.startswith(".") for part in parts)
    beside = path.parent.is_dir() and not is_cached and not path.is_relative_to(PACKAGE)
    return f"{path if beside else checkpoint_name(path)}{ending}"


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint's directory; in the hub's cache, with its hashes, the model's name."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parents[1].name.rsplit("--", 1)[-1]
    return path.name


def download_command(path: Path, name: str) -> str:
    """Return the command that downloads a checkpoint again, beside it; ``name`` stands for its id where none is known.

    What the hub's cache has of it is left alone.
    """
    model = path.resolve().parent.parent.name
    name = "/".join(model.split("--")[1:]) if model.startswith("models--") else name
    return shlex.join(["hf", "download", name, "--local-dir", output_of(str(path), "-original"), "--force-download"])


def train_command(checkpoint: str) -> str:
    """Return the command that retrains a checkpoint's own head, or trains a new one for a checkpoint without a head."""
    recipe = shlex.quote(Path(output_of(checkpoint, ".yaml")).name)
    return f"mtp-train init {recipe} --trunk {shlex.quote(checkpoint)} && accelerate launch -m mtp_train {recipe}"


def _card_header(checkpoint: Path) -> str:
    card = checkpoint / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    header = re.match(r"---\n(.*?)\n---", text, flags=re.DOTALL)
    return "" if header is None else header.group(1)


def original_of(checkpoint: Path) -> str | None:
    """Return what a checkpoint was converted from, by the card that MLX's converter writes; None without one."""
    return named_base(checkpoint) if "library_name: mlx" in _card_header(checkpoint) else None


def named_base(checkpoint: Path) -> str | None:
    """Return the base that a model card names (``base_model:`` in its header), None without one.

    A checkpoint of that name beside this one is taken as the base; otherwise the name is a hub id.
    """
    named = re.search(r"^base_model:\s*(?:\n-\s*)?(\S+)\s*$", _card_header(checkpoint), flags=re.MULTILINE)
    if named is None:
        return None
    name = named.group(1).strip("'\"")
    beside = checkpoint.parent / name.rsplit("/", 1)[-1]
    return str(beside) if (beside / "config.json").is_file() else name
