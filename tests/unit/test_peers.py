"""The comparison with other trainers: what a peer is given, whose head is decoded, and how it resumes.

Stand-ins take the places of a peer, which leaves the head as it was, or has our new one, and of vLLM.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import peers
from engines import launch
from json_files import read_json
from mtp_train import inspect
from peers import Cell
from runs import write_inputs, write_recipe

STAND_IN = """
import json, pathlib, shutil, sys
texts, verifier, out = map(pathlib.Path, sys.argv[1:4])
if "--draft-vocab" in sys.argv:
    shutil.copytree(out.with_name("ours-kl-0.006-0") / "head", out / "draft")
else:
    shutil.copytree(verifier, out / "stitched")
print(json.dumps({"cpu_seconds": 1, "flags": sys.argv[4:], "texts": len(json.loads(texts.read_text()))}))
"""
VLLM = """
import json, pathlib, sys
prompts = json.loads(pathlib.Path(sys.argv[1]).read_text())["prompts"]
rounds = [{"drafts": [], "committed": [1]}, {"drafts": [2, 3], "committed": [2, 4]}]
pathlib.Path(sys.argv[2]).write_text(json.dumps({"engine": "vllm", "texts": [rounds] * len(prompts)}))
"""
OURS, PEER = Cell("ours", "ce", "0.006"), Cell("speculators_before_norm", "ce", "0.001")


def test_a_peer_trains_on_our_answers_and_our_decoder_judges_its_head(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train_speculators.py"
    program.write_text(STAND_IN)
    python = tmp_path / "speculators/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "run_vllm.py").write_text(VLLM)
    monkeypatch.setattr(peers, "PROGRAMS", tmp_path)
    monkeypatch.setattr(launch, "PROGRAMS", tmp_path)
    monkeypatch.setitem(peers.TRAINERS, "mtp", (("ours", "ce"), ("speculators_before_norm", "ce")))
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        write_inputs(tmp_path / "in"),
        tmp_path / "run",
        train__max_steps=2,
        data__regenerate={"max_new_tokens": 12},
    )
    argv = [str(recipe), "--environments", str(tmp_path), "--out", str(out), "--seeds", "1", "--rates"]
    native = [*argv, "0.006,0.001", "--vllm", sys.executable]
    found = peers.main(native)
    start = read_json(out / "start.json")
    # The stand-in's head is the graft, and ours has moved.
    assert found["counts"][PEER.name] == {one: [counts] for one, counts in start.items()}
    assert found["counts"][OURS.name] != found["counts"][PEER.name]
    # Each head in a checkpoint of its own; one round with drafts a prompt, of which one is right.
    assert read_json(out / "peers_vllm.json")["counts"][OURS.name] == {"0": [[[1, 1]] * found["prompts"]]}
    served = [Path(read_json(out / f"{one.name}-0/vllm/job.json")["checkpoint"]) for one in (OURS, PEER)]
    assert served[1] == out / f"{PEER.name}-0/stitched"
    assert all(inspect(one).status == "healthy" for one in served)
    (cost,) = found["costs"][PEER.name]
    flags = dict(zip(cost["flags"][::2], cost["flags"][1::2], strict=True))
    assert (flags["--steps"], flags["--states"], flags["--lr"], flags["--seed"]) == ("2", "before_norm", "0.001", "0")
    texts = json.loads((out / "texts.json").read_text())
    assert cost["texts"] == len(texts) > 0
    assert all(len(one["input_ids"]) == len(one["loss_mask"]) and any(one["loss_mask"]) for one in texts)
    # Sampled drafts show whether the peer's new head is the one that is decoded.
    eagle3 = ["head.kind=eagle3", "head.init=random", "model.head_from=null", "evaluate.arms=[none, retrained]"]
    new = peers.main([*argv, "0.006", "--out", f"{out}3", "head.draft_vocab=64", *eagle3])["counts"]
    assert new["ours-kl-0.006"] == new["speculators-kl-0.006"]
    program.write_text("raise SystemExit(1)")
    assert peers.main(native)["counts"] == found["counts"]
