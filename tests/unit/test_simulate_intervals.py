"""The simulation behind the choice of a statistic: it runs, and its shares are shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mtp_train.acceptance.counts import num_groups


def test_heads_are_equal_in_shape_and_shares_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import simulate_intervals

    first, second = simulate_intervals.equal_heads(np.random.default_rng(0), 8, (13, 2, 3), 0.3)
    assert [one.group for one in first] == [one.group for one in second]
    assert (len(first), num_groups(first)) == (13 + 2 + 3 + 13 + 2 + 3 + 13 + 2, 8)
    found = simulate_intervals.simulate(6, (6,), 0.3, studies=60)
    # Six correlated prompts a group, prompt by prompt: the control is wrong far more often.
    assert found["passed_groups"] <= 0.1 < found["covered_groups"]
    assert found["passed_prompts"] >= found["passed_groups"]
    assert 0.0 <= found["passed_bootstrap"] <= 0.2
