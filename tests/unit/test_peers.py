"""The comparison with other trainers: what a peer is given, whose head is decoded, and how it resumes.

A stand-in takes the peer's place: it leaves the head as it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import peers
from json_files import read_json
from peers import Cell
from runs import write_inputs, write_recipe

STAND_IN = """
import json, pathlib, shutil, sys
texts, verifier, out = map(pathlib.Path, sys.argv[1:4])
shutil.copytree(verifier, out / "stitched")
print(json.dumps({"cpu_seconds": 1, "flags": sys.argv[4:], "texts": len(json.loads(texts.read_text()))}))
"""
OURS, PEER = Cell("ours", "ce", "0.006"), Cell("speculators_before_norm", "ce", "0.001")


def test_a_peer_trains_on_our_answers_and_our_decoder_judges_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train_speculators.py"
    out = tmp_path / "out"
    program.write_text(STAND_IN)
    python = tmp_path / "speculators" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(peers, "PROGRAMS", tmp_path)
    monkeypatch.setattr(peers, "TRAINERS", {"mtp": (("ours", "ce"), ("speculators_before_norm", "ce"))})
    settings: dict[str, Any] = {"train__max_steps": 2, "data__regenerate": {"max_new_tokens": 12}}
    recipe = write_recipe(tmp_path / "recipe.yaml", write_inputs(tmp_path / "in"), tmp_path / "run", **settings)
    argv = [str(recipe), "--environments", str(tmp_path), "--out", str(out), "--seeds", "1", "--rates", "0.006,0.001"]
    found = peers.main(argv)
    start = read_json(out / "start.json")
    # The stand-in's head is the graft, and ours has moved.
    assert found["counts"][PEER.name] == {one: [counts] for one, counts in start.items()}
    assert found["counts"][OURS.name] != found["counts"][PEER.name]
    (cost,) = found["costs"][PEER.name]
    flags = dict(zip(cost["flags"][::2], cost["flags"][1::2], strict=True))
    assert (flags["--steps"], flags["--states"], flags["--lr"], flags["--seed"]) == ("2", "before_norm", "0.001", "0")
    texts = json.loads((out / "texts.json").read_text())
    assert cost["texts"] == len(texts) > 0
    assert all(len(one["input_ids"]) == len(one["loss_mask"]) and any(one["loss_mask"]) for one in texts)
    program.write_text("raise SystemExit(1)")
    assert peers.main(argv)["counts"] == found["counts"]
