"""Keep the trunk's layers in main memory or on disk, for a device that cannot hold them: one layer at a time is loaded.

accelerate's hooks load each layer before it runs. Embedding, output matrix and norms stay on the device, because they
are also read outside of their modules' forward.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Literal

import torch
from accelerate import cpu_offload, disk_offload

from mtp_train.trunk.load import Trunk

Offload = Literal["cpu", "disk"]
FOLDER_PREFIX = ".offload-"


def offload_layers(trunk: Trunk, offload: Offload, device: torch.device, directory: Path) -> None:
    """Move a trunk to the device, except its layers; ``drop_layers`` frees their memory or disk space again.

    Args:
        directory: Directory for a hidden folder with the layers on disk; the folder is deleted with the layers.
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
        # Load each layer as a whole: some layers read the weights of a submodule without calling it.
        whole = [type(layer).__name__]
        if folder is None:
            cpu_offload(layer, execution_device=device, preload_module_classes=whole)
        else:
            disk_offload(layer, folder / f"{index:05d}", execution_device=device, preload_module_classes=whole)
    trunk.offloaded = True
