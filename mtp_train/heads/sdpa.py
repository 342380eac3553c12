"""Which kernel torch's ``scaled_dot_product_attention`` runs in our forwards: any of its own but cuDNN's.

torch 2.11 and later try cuDNN first on Hopper and data-centre Blackwell GPUs. Its backward pass with an attention mask
returns NaN in the queries' gradient where the length is 64 modulo 128 (pytorch#196678), and it builds a plan for every
new shape, which takes about a second: documents and prompts have as many shapes as lengths. FlashAttention takes what
has no mask, the memory-efficient kernel what has one; neither has the two faults.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_enabled_before = True


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Keep ``scaled_dot_product_attention`` from cuDNN inside this context, or inside a decorated function.

    torch has one setting for the whole process. Importing us leaves it alone, and so does a forward of ours once it is
    over: the last thread to leave puts back what the first one found. Other threads go without cuDNN meanwhile.
    The backward pass runs the kernels that belong to those of the forward; a recomputed forward chooses anew.
    """
    global _inside, _enabled_before
    backends = torch.backends.cuda
    with _lock:
        if _inside == 0:
            _enabled_before = backends.cudnn_sdp_enabled()
            backends.enable_cudnn_sdp(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                backends.enable_cudnn_sdp(_enabled_before)
