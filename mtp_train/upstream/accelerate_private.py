"""Every use of an undocumented part of accelerate: the state that it keeps by class.

``SYMBOLS`` is looked up by tests/unit/test_upstream.py. accelerate is imported when a function is called.
"""

from __future__ import annotations

from typing import Any

from mtp_train.upstream.symbols import Symbol

SYMBOLS = (
    Symbol(
        "accelerate.state:PartialState",
        "_shared_state",
        "job/study/drift.py",
        "the state can be reset, but not put back: a launched process trains alone for a while, and then goes on",
    ),
    Symbol("accelerate.state:AcceleratorState", "_shared_state", "job/study/drift.py", "as above"),
    Symbol("accelerate.state:GradientState", "_shared_state", "job/study/drift.py", "as above"),
)


def shared_states() -> list[dict[str, Any]]:
    """Return the dicts in which accelerate keeps the state of this process, to clear and to fill again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return [cls._shared_state for cls in (PartialState, AcceleratorState, GradientState)]
