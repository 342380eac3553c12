from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from mtp_train.data.groups import is_held_out, split_by_group, stable_share
from mtp_train.errors import DataError


@dataclass(frozen=True)
class Item:
    group: str
    number: int


ITEMS = [Item(f"group {number % 50}", number) for number in range(200)]


def test_a_group_is_never_on_both_sides() -> None:
    train, held_out = split_by_group(ITEMS, 0.2, 0)
    assert not {item.group for item in train} & {item.group for item in held_out}
    assert sorted(train + held_out, key=lambda item: item.number) == ITEMS


def test_the_share_held_out_is_about_the_one_asked_for() -> None:
    held_out = sum(is_held_out(str(number), 0.1, 0) for number in range(2000))
    assert 150 < held_out < 250  # 200 expected, standard deviation 13


def test_the_side_depends_on_group_and_seed_alone() -> None:
    train, held_out = split_by_group(ITEMS, 0.2, 0)
    assert split_by_group(ITEMS[::-1], 0.2, 0) == (train[::-1], held_out[::-1])
    assert split_by_group(held_out + train[:1], 0.2, 0) == (train[:1], held_out)
    assert split_by_group(ITEMS, 0.2, 1)[1] != held_out


def test_the_side_is_the_same_in_every_process() -> None:
    code = "from mtp_train.data.groups import stable_share; print(stable_share('a', 3))"
    shares = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert shares == {str(stable_share("a", 3))}


@pytest.mark.parametrize(("holdout", "side"), [(1e-9, "held-out"), (1 - 1e-9, "train")])
def test_an_empty_side_is_refused(holdout: float, side: str) -> None:
    with pytest.raises(
        DataError, match=rf"leaves the {side} side empty \(200 records in 50 groups\); expected records on both sides"
    ):
        split_by_group(ITEMS, holdout, 0)
