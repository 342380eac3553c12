"""torch's flex_attention with gradients on a CPU: traced as for a GPU, forward and backward, but computed eagerly.

torch refuses gradients there because it has no kernel for them; what the compiler traces computes them all the same.
Called without the compiler it gives wrong gradients where scores are changed and activations recomputed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from mtp_train.heads import flex


@contextmanager
def flex_on_cpu() -> Iterator[CompileCounterWithBackend]:
    """Let heads be unrolled by flex_attention here; yields what counts how often it was compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch_flex.flex_attention, backend=counter, fullgraph=True, dynamic=False)
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # The compiler looks at what it is warned of, and hides the warnings from itself in a way of its own.
        warnings.simplefilter("ignore")
        patch.setattr(flex, "_compiled", lambda: compiled)
        patch.setattr(flex, "_DEVICES", ("cpu",))
        patch.setattr(torch_flex, "_validate_device", lambda *_tensors: None)
        yield counter
    torch.compiler.reset()
