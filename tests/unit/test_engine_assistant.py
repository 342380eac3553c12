"""How ``scripts/engine_parity.py`` compares an assistant: at the position and with the window of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from assistants import HAS_ASSISTANTS, tiny_assistant, tiny_gemma_trunk
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.heads import assistant
from mtp_train.upstream.transformers_private import replacing
from repository import SCRIPTS
from tiny import random_tokens


@pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
def test_it_is_compared_at_the_engine_s_position_and_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from engines.launch import ENGINES
    from engines.ours import decode
    from engines.witness import Task, compare_decoding, controls, job_of

    tiny_gemma_trunk().causal_lm.save_pretrained(tmp_path / "trunk")
    tiny_assistant().save_pretrained(tmp_path / "draft")
    task = Task(
        engine=ENGINES["vllm"],
        checkpoint=open_checkpoint(tmp_path / "trunk"),
        prompts=random_tokens(12, 3).tolist(),
        max_new_tokens=24,
        dtype="float32",
        python="",
        files={},
        work=tmp_path,
        draft=tmp_path / "draft",
    )
    assert job_of(task, 3)["draft"] == {"kind": "mtp", "path": str(tmp_path / "draft")}
    with replacing(assistant, POSITION_OFFSET=0, MORE_SLIDING_KEYS=0):
        texts = decode(task.tested, task.prompts, depth=3, max_new_tokens=24, eos_ids=(), leading_row=False)
    document = {"texts": [[one._asdict() for one in text.rounds] for text in texts]}
    assert compare_decoding(task, 3, document)["verdict"] == "equal"
    wrong = controls(task, lambda one: compare_decoding(one, 3, document))
    assert {name: one["verdict"] for name, one in wrong.items()} == {
        "other_position": "different",
        "other_window": "different",
    }
