"""The comparison of objectives, texts and unrolls: what it pairs, what it reports, how it resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.acceptance.counts import PromptCounts
from mtp_train.errors import MtpError
from runs import write_inputs, write_recipe

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


def counts(*accepted: int) -> list[PromptCounts]:
    """Ten rounds a prompt, in which so many first drafts were accepted."""
    return [
        PromptCounts(
            prompt_id=str(index),
            rounds=10,
            num_draft_tokens=10,
            accepted_per_pos=(number,),
            new_tokens=10 + number,
            seconds=1.0,
            group=str(index),
        )
        for index, number in enumerate(accepted)
    ]


def test_prompts_are_pooled_over_seeds_and_compared_with_their_own() -> None:
    from ablate import Cell, rows_of

    reference, better = Cell("kl", "self", "exact"), Cell("ce", "self", "exact")
    # The second is one draft better on every prompt, whose spread is far larger than that.
    low = [counts(0, 4, 8, 2), counts(1, 5, 7, 3)]
    high = [counts(1, 5, 9, 3), counts(2, 6, 8, 4)]
    found = {reference: [{0.0: one, 1.0: one} for one in low], better: [{0.0: one, 1.0: one} for one in high]}
    rows = [row for row in rows_of(found, reference) if row.temperature == 0.0]
    assert [row.cell for row in rows] == ["self-exact-kl", "self-exact-ce"]
    # By hand: 30 accepted in 80 rounds, and 38.
    assert [row.tau for row in rows] == pytest.approx([1.375, 1.475])
    assert rows[1].tau_of_seeds == pytest.approx([1.45, 1.5])
    assert (rows[1].gain, rows[0].gain) == (pytest.approx(0.1), 0.0)
    assert rows[1].gain_of_seeds == pytest.approx([0.1, 0.1])
    assert rows[1].gain_ci95 is not None
    # No spread over groups or seeds, by hand: nothing to judge a gain by.
    assert rows[1].gain_ci95 == pytest.approx((0.1, 0.1))
    assert (rows[0].p_value, rows[0].groups) == (None, 4)
    assert rows[1].tau_ci95 is not None
    assert rows[1].tau_ci95[1] - rows[1].tau_ci95[0] > 0.3


def test_gains_are_judged_over_groups_and_seeds() -> None:
    """A gain is not significant if it varies between seeds (even if equal over groups), or with few groups."""
    from ablate import Cell, rows_of

    reference, other = Cell("kl", "self", "exact"), Cell("ce", "self", "exact")
    base = [counts(*[3, 4, 5, 4] * 5)] * 3

    def judged(*seeds: list[PromptCounts]) -> Any:
        found = {reference: [{0.0: one, 1.0: one} for one in base], other: [{0.0: one, 1.0: one} for one in seeds]}
        return next(row for row in rows_of(found, reference) if row.cell == other.name)

    sure = judged(*[counts(*[5, 6, 7, 7] * 5)] * 2, counts(*[5, 6, 7, 8] * 5))
    assert sure.survives
    by_seed = judged(counts(*[3, 4, 5, 4] * 5), counts(*[3, 4, 5, 5] * 5), counts(*[8, 8, 8, 9] * 5))
    assert by_seed.gain > 0.1
    assert not by_seed.survives
    in_two_groups = [
        [replace(one, group=f"g{number % 2}") for number, one in enumerate(some)] for some in (base[0], seeds_of_gain())
    ]
    found = {cell: [{0.0: some, 1.0: some}] * 3 for cell, some in zip((reference, other), in_two_groups, strict=True)}
    few = next(row for row in rows_of(found, reference) if row.cell == other.name)
    assert (few.groups, few.survives) == (2, False)
    assert few.gain == pytest.approx(judged(*[seeds_of_gain()] * 3).gain)
    assert judged(*[seeds_of_gain()] * 3).survives


def seeds_of_gain() -> list[PromptCounts]:
    return counts(*[5, 6, 7, 8] * 4, 5, 6, 7, 7)


@pytest.mark.parametrize(("name", "num_survivors"), [("objectives.json", 18), ("objectives_sampled.json", 0)])
def test_a_record_is_judged_over_all_its_gains(
    name: str, num_survivors: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import recorded_ablation

    found = recorded_ablation.main([str(SCRIPTS.parent / "inference" / "benchmarks" / name)])
    *rows, counted, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == found
    assert counted == f"{num_survivors} of {len(found)} survive"
    assert sum(row.count(" *") for row in rows) == num_survivors
    page = (SCRIPTS.parent / "inference" / "benchmarks" / "objectives.md").read_text()
    assert counted in page
    if name == "objectives.json":
        assert "\n".join(rows) in page
        assert {f"{text}-exact-{loss}" for text in ("self", "corpus") for loss in ("tv", "e2e_tv")} < {
            one["cell"] for one in found if one["survives"]
        }


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    inputs = write_inputs(tmp_path / "in")
    settings: dict[str, Any] = {"train__max_steps": 2, "data__regenerate": {"max_new_tokens": 12}}
    return write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **settings)


def test_every_cell_is_trained_measured_and_not_done_twice(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ablate

    out = tmp_path / "out"
    argv = [str(recipe), "--out", str(out), "--losses", "kl,ce", "--unrolls", "exact,on_policy", "--seeds", "2"]
    found = ablate.main(argv)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(found))
    names = {
        f"{text}-{unroll}-{loss}"
        for text in ("self", "corpus")
        for unroll in ("exact", "on_policy")
        for loss in ("kl", "ce")
    }
    assert {(row["cell"], row["temperature"]) for row in found["rows"]} == {(n, t) for n in names for t in (0.0, 1.0)}
    heads = [path.read_bytes() for path in out.glob("*/head/*.safetensors")]
    assert len(heads) == len(set(heads)) == 16

    monkeypatch.setattr(ablate, "train_stage", None)
    (out / "self-exact-kl-1" / "counts.json").unlink()
    again = ablate.main(argv)
    assert again["rows"] == found["rows"]


def test_figures_of_two_recipes_are_not_mixed(recipe: Path, tmp_path: Path) -> None:
    import ablate

    argv = [str(recipe), "--out", str(tmp_path / "out"), "--losses", "kl", "--texts", "self", "--unrolls", "exact"]
    ablate.main([*argv, "--seeds", "1"])
    with pytest.raises(MtpError, match="recipe"):
        ablate.main([*argv, "--seeds", "1", "train.lr=1e-4"])


@pytest.mark.parametrize("option", [["--losses", "kl,mse"], ["--texts", "web"], ["--unrolls", ""], ["--seeds", "0"]])
def test_unknown_choices_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import ablate

    with pytest.raises(SystemExit):
        ablate.main(["recipe.yaml", "--out", "out", *option])
    assert f"error: {option[0]}: " in capsys.readouterr().err
