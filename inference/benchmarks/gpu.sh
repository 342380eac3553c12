#!/usr/bin/env bash
# Measure on one GPU, in parts of at most ten minutes; gpu/README.md lists their steps.
#
#   inference/benchmarks/gpu.sh A --out DIR          one part; A, B and C take less than 26 minutes in all
#   inference/benchmarks/gpu.sh all --cpu --out DIR  every step of A, B and C in small shapes, without a GPU
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(command -v python3 || command -v python) || {
    echo "gpu.sh: no python3 on PATH; expected one with torch. Activate its environment." >&2
    exit 2
}
exec "$python" "$here/gpu_parts.py" "$@"
