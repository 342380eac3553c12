"""Installed kernels of recurrent layers are used where they fit, with the arguments that they take."""

from __future__ import annotations

from typing import Any

import pytest

from launching import environment, told_by
from simulated_device import AVAILABLE
from tiny import CACHE_KINDS
from tolerances import FAR, GROWTH

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch takes no device that is written in Python")
CHUNKED = {"recurrent": "chunk_gated_delta_rule", "channels": "chunk_kda", "mamba": "mamba_chunk_scan_combined"}
SINGLE = {"recurrent": "fused_recurrent_gated_delta_rule", "channels": "fused_recurrent_kda"}
SINGLE["mamba"] = "selective_state_update"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "recurrent" else pytest.mark.slow)
        for kind in CHUNKED
        if kind in CACHE_KINDS
    ],
)
def test_prefill_and_training_run_in_the_kernels_and_give_what_torch_gives(kind: str) -> None:
    told = told_by("kernel_jobs.py", kind, env=environment())
    found: dict[str, Any] = told["kinds"][kind]
    on_cpu, without, with_kernels = found["texts"]
    assert on_cpu == without == with_kernels
    assert found["packed"][0] == found["packed"][1]
    assert found["without"] == [], "a kernel ran on the CPU, or on a device that it is not for"
    # Calls: name, tokens, whether an earlier state was given, whether the state after them was asked for. A prompt's
    # first chunk has no state before it; its later chunks have one, and the last of one prompt is a single token.
    chunked = [call[1:] for call in found["decoded"] if call[0] == CHUNKED[kind]]
    assert chunked == [[5, False, True], [8, False, True], [8, True, True]]
    assert [SINGLE[kind], 1, True, True] in found["decoded"]
    # Documents of a packed row, padded to the longest of their group.
    trained = [call[1:] for call in found["trained"] if call[0] == CHUNKED[kind]]
    assert trained == [[3, False, False], [12, False, False]]
    assert CHUNKED[kind] not in {call[0] for call in found["in_fp32"]}
    assert "causal_conv1d_fn" in {call[0] for call in found["in_fp32"]}
    assert found["apart"] <= GROWTH, "three chunks differ from one"
    assert found["forgotten"] > FAR, "a lost state was not found"
    assert len(told["refused"]) == 10, told["refused"]
