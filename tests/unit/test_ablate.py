"""The comparison of objectives, texts and unrolls: what it pairs, what it reports, how it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ablate
from recorded_ablation import contrasts, tables
from runs import Capture, write_inputs, write_recipe


def record(cells: dict[str, list[list[int]]], groups: int = 0) -> dict[str, Any]:
    """A record of one temperature: by cell and seed, the first drafts accepted in ten rounds of each prompt."""
    num_prompts = len(next(iter(cells.values()))[0])
    return {
        "reference": next(iter(cells)),
        "groups": {str(number): f"g{number % (groups or num_prompts)}" for number in range(num_prompts)},
        "counts": {cell: {"0": [[(10, one) for one in seed] for seed in seeds]} for cell, seeds in cells.items()},
    }


def test_cells_that_differ_in_one_thing_are_compared_prompt_by_prompt() -> None:
    # The second of each text is one draft better on every prompt, whose spread is far larger than that.
    low = [[0, 4, 8, 2], [1, 5, 7, 3]]
    high = [[1, 5, 9, 3], [2, 6, 8, 4]]
    document = record({"self-exact-kl": low, "self-exact-ce": high, "corpus-exact-kl": high, "corpus-exact-ce": high})
    found = contrasts(document)
    assert [(one["cell"], one["against"]) for one in found] == [
        ("self-exact-ce", "self-exact-kl"),
        ("corpus-exact-kl", "self-exact-kl"),
        ("corpus-exact-ce", "self-exact-ce"),
        ("corpus-exact-ce", "corpus-exact-kl"),
    ]
    # By hand: 30 accepted in 80 rounds, and 38. No spread over groups or seeds: nothing to judge a gain by.
    assert [one["gain"] for one in found] == pytest.approx([0.1, 0.1, 0.0, 0.0])
    assert found[0]["gain_ci95"] == pytest.approx((0.1, 0.1))
    assert "| self | exact | ce | 1.48 |" in tables(document, found)
    assert "| ce - kl | self, exact | +0.10 [+0.10, +0.10]" in tables(document, found)


def test_gains_are_judged_over_groups_and_seeds() -> None:
    """A gain is not significant if it varies between seeds (even if equal over groups), or with few groups."""
    base = [3, 4, 5, 4] * 5
    better = [5, 6, 7, 7] * 5

    def survives(*seeds: list[int], groups: int = 0) -> bool:
        (found,) = contrasts(record({"self-exact-kl": [base] * 3, "self-exact-ce": list(seeds)}, groups))
        assert found["gain"] > 0.1
        return bool(found["survives"])

    assert survives(better, better, [5, 6, 7, 8] * 5)
    assert not survives(base, [3, 4, 5, 5] * 5, [8, 8, 8, 9] * 5)
    ragged = [5, 6, 7, 8] * 4 + [5, 6, 7, 7]
    assert survives(ragged, ragged, ragged)
    assert not survives(ragged, ragged, ragged, groups=2)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    inputs = write_inputs(tmp_path / "in")
    settings: dict[str, Any] = {"train__max_steps": 2, "data__regenerate": {"max_new_tokens": 12}}
    return write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **settings)


def test_every_cell_is_trained_measured_and_not_done_twice(
    recipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    argv = [str(recipe), "--out", str(out), "--losses", "kl,ce", "--unrolls", "exact,fastmtp", "--seeds", "2"]
    found = ablate.main(argv)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(found))
    names = {
        f"{text}-{unroll}-{loss}"
        for text in ("self", "corpus")
        for unroll in ("exact", "fastmtp")
        for loss in ("kl", "ce")
    }
    assert {(cell, warm) for cell, of_cell in found["counts"].items() for warm in of_cell} == {
        (name, warm) for name in names for warm in ("0", "1")
    }
    heads = [path.read_bytes() for path in out.glob("*/head/*.safetensors")]
    assert len(heads) == len(set(heads)) == 16

    monkeypatch.setattr(ablate, "train_stage", None)
    (out / "self-exact-kl-1" / "counts.json").unlink()
    again = ablate.main(argv)
    assert again["counts"] == found["counts"]
