#!/usr/bin/env python
"""Count the drafts that llama-server accepts from the heads inside GGUF files of one trunk, by its own counters.

    mtp-train rescue tuned.gguf --from demo:base --data prompts.jsonl --out rescued
    mtp-train graft tuned.gguf --from demo:base --out stale.gguf
    python scripts/gguf_acceptance.py --server llama-server --tokenizer demo:finetune --prompts prompts.jsonl \
        --out RECORD.json none=tuned.gguf stale=stale.gguf retrained=rescued/tuned-mtp.gguf

The first arm decodes without drafts. Every arm's texts are compared with the first one's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.sources import load_records
from mtp_train.data.tokenize import build_prompts
from mtp_train.runs.checkpoint_tools.gguf_files import inspect_gguf
from mtp_train.trunk.tokenizer import load_tokenizer

PORT, SECONDS_TO_LOAD = 18_080, 600


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to the server; return its answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def wait(server: subprocess.Popen[bytes]) -> None:
    """Wait until the server has loaded its model."""
    for _ in range(SECONDS_TO_LOAD):
        try:
            ask("health")
            return
        except urllib.error.URLError:
            if server.poll() is not None:
                raise
            time.sleep(1)


def decode(file: str, prompts: list[tuple[int, ...]], options: argparse.Namespace, drafts: bool) -> dict[str, Any]:
    """Decode the prompts one at a time, greedily; return the server's counters and the texts."""
    flags = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(options.depth)] if drafts else []
    words = [options.server, "-m", file, "--port", str(PORT), "-t", str(options.threads), "-np", "1", *flags]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait(server)
            settings = {"n_predict": options.new_tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
            answers = [ask("completion", {"prompt": list(ids), **settings}) for ids in prompts]
        finally:
            server.kill()
    timings = [answer["timings"] for answer in answers]
    drafted, accepted, tokens = (
        sum(one.get(name, 0) for one in timings) for name in ("draft_n", "draft_n_accepted", "predicted_n")
    )
    return {
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "tau": round(tokens / (tokens - accepted), 3),
        "texts": [answer["tokens"] for answer in answers],
    }


def main() -> None:
    """Decode with every arm, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="NAME=FILE", help="the first decodes without drafts")
    for name in ("server", "tokenizer", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("count", 24), ("depth", 3), ("threads", 1), ("new-tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    tokenizer = load_tokenizer(open_location(options.tokenizer), trust_remote_code=False)
    records = load_records(options.prompts)[: options.count]
    prompts = [one.prompt_ids for one in build_prompts(records, tokenizer)]
    version = subprocess.run([options.server, "--version"], capture_output=True, text=True, check=True).stderr
    found = {}
    for index, arm in enumerate(options.arms):
        name, _, file = arm.partition("=")
        state = inspect_gguf(Path(file))
        found[name] = decode(file, prompts, options, drafts=index > 0)
        found[name] |= {"trunk": state.quantisation, "head": state.head_quantisation}
    plain = next(iter(found.values()))["texts"]
    for one in found.values():
        one["same_texts"] = sum(text == other for text, other in zip(one.pop("texts"), plain, strict=True))
    settings = {key: value for key, value in vars(options).items() if key not in ("server", "out", "arms")}
    settings |= {"llama.cpp": version.splitlines()[0], "date": str(datetime.date.today()), "prompts": len(prompts)}
    write_json(Path(options.out), {"settings": settings, "arms": found})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
