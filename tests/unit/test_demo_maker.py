"""The maker of the demo: one code path makes the pair that ships and pairs of other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from demo_maker.corpus import SourceFile
from demo_maker.install import code_lines, prompt_lines
from demo_maker.records import described_functions
from demo_maker.sizes import DEMO, Size
from demo_maker.stages import make_base, make_finetune
from demo_maker.texts import Texts
from demo_maker.training import TrainSettings
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.heads.diagnose import diagnose_head

SMALL = Size(
    shape={**DEMO.shape, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    base=TrainSettings(lr=1e-3, warmup_steps=1),
    base_tokens=2 * 2 * 32,
    base_row_tokens=32,
    base_rows=2,
    finetune=TrainSettings(lr=1e-3, warmup_steps=1, weight_decay=0.0),
    finetune_rows=3,
    finetune_epochs=2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts() -> Texts:
    source = "".join(f"def f{n}(a, b={n}):\n    'Add {n}.'\n    return a + b\n\n\n" for n in range(240))
    file = SourceFile("adder", source)
    described = described_functions(file)
    return Texts(code=[file], chat=described[:6], prompts=described, unseen_code=[file])


def test_a_pair_of_another_size_goes_the_way_of_the_one_that_ships(texts: Texts, tmp_path: Path) -> None:
    make_base(texts, tmp_path, SMALL, CPU)
    make_finetune(texts, tmp_path, SMALL, CPU)
    base, finetune = (diagnose_head(open_checkpoint(tmp_path / name)) for name in ("base", "finetune"))
    assert base.complete
    assert (finetune.declared_modules, finetune.present_modules) == (1, 0)
    notes = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("base", "finetune")]
    # Two epochs of six exchanges, three at a time.
    assert [note["log"][-1]["step"] for note in notes] == [2, 4]
    assert notes[0]["trained_tokens"] == SMALL.base_tokens
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert {name: config[name] for name in SMALL.shape} == SMALL.shape


def test_texts_of_a_pair_are_sources_of_a_recipe(texts: Texts) -> None:
    prompts, code = list(prompt_lines(texts)), list(code_lines(texts.unseen_code))
    assert len(prompts) == 240
    assert {line["group"] for line in prompts + code} == {"adder"}
    assert [message["role"] for message in prompts[0]["messages"]] == ["user", "assistant"]
