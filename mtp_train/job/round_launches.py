"""Count the kernels of a decoding round from a model's config: a round on the meta device has no weights to read."""

from __future__ import annotations

import torch
from torch import nn

from mtp_inference import HeadDrafting
from mtp_inference.bench.launches import launches_of_a_round
from mtp_inference.kernels.fused import FusedKernels
from mtp_train.errors import MtpError
from mtp_train.heads.module import MtpHead
from mtp_train.train.hours import RoundLaunches
from mtp_train.trunk.load import Trunk


def count_launches(trunk: Trunk, head: MtpHead, depth: int, *, fuses: bool) -> tuple[RoundLaunches, str | None]:
    """Count the launches of rounds of one text, without drafts and with ``depth`` drafts.

    Args:
        trunk: A trunk on the meta device; its dtype is changed, as some operations exist there in bf16 only.
        head: Its head, on the meta device.
        depth: Drafts of a round.
        fuses: Whether rounds run in the fused kernels of a GPU, or in torch's operations.

    Returns:
        The launches, and the reason why they are assumed and not counted, if so: some models choose experts by an
        operation that reads its input on the host.
    """
    models: list[nn.Module] = [trunk.causal_lm.to(torch.bfloat16), head.to(torch.bfloat16)]
    fused = FusedKernels(models) if fuses else None
    try:
        plain = launches_of_a_round(trunk, None, 0, fused)
        drafting = launches_of_a_round(trunk, HeadDrafting(head), depth, fused)
    except (MtpError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return RoundLaunches.assumed(len(trunk.layers), depth), reason
    return RoundLaunches(plain.total(), drafting.total()), None
