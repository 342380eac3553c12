"""The trunk's layers in main memory or on disk, for a device that does not hold them: one at a time is there, and runs.

accelerate's hooks bring them. What is left - embedding, output matrix, norms - stays on the device: it is read outside
of its modules' forward.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Literal

import torch
from accelerate import cpu_offload, disk_offload

from mtp_train.errors import CheckpointError, RecipeError
from mtp_train.families import RawConfig
from mtp_train.heads.trunk import Trunk
from mtp_train.weights.quantised import quant_method

Offload = Literal["cpu", "disk"]
FOLDER_PREFIX = ".offload-"


def require_offload(offload: Offload, world_size: int, config: RawConfig, *, where: Path) -> None:
    """Check that a checkpoint's layers can be brought one at a time, and that one process asks for them.

    Raises:
        RecipeError: There are several processes.
        CheckpointError: Its weights are quantised.
    """
    if world_size > 1:
        raise RecipeError(
            [
                f"model.offload: {offload}, and {world_size} processes; expected one. Launch with "
                "recipes/accelerate/single.yaml; or write model.offload: null and use recipes/accelerate/fsdp2.yaml."
            ]
        )
    method = quant_method(config)
    if method is not None:
        raise CheckpointError(
            f"{where}: quantised with {method}, and model.offload says {offload}; expected plain weights. Write "
            "model.offload: null, or point model.trunk at the unquantised checkpoint."
        )


def offload_layers(trunk: Trunk, offload: Offload, device: torch.device, directory: Path) -> None:
    """Move a trunk to the device, all but its layers; ``drop_layers`` gives back what they take elsewhere.

    Args:
        trunk: The trunk, in main memory.
        offload: Where its layers go.
        device: Where they run.
        directory: Where a hidden folder is made for layers on disk; it goes with them.
    """
    layers = trunk.layers
    trunk.drop_layers()
    trunk.to(device)
    trunk.decoder.layers = layers
    folder = None
    if offload == "disk":
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=directory))
        weakref.finalize(layers, shutil.rmtree, folder, ignore_errors=True)
    for index, layer in enumerate(layers):
        # As a whole: some layers read a part's weights without calling it.
        whole = [type(layer).__name__]
        if folder is None:
            cpu_offload(layer, execution_device=device, preload_module_classes=whole)
        else:
            disk_offload(layer, folder / f"{index:05d}", execution_device=device, preload_module_classes=whole)
    trunk.offloaded = True
