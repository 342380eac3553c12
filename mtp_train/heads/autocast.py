"""Ask for the dtype of autocast, for operations that do not follow it by themselves."""

from __future__ import annotations

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies on a device; None where it is off, or the device has none."""
    kind = device.type
    # Some devices have no autocast: asking whether it is enabled raises there.
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
