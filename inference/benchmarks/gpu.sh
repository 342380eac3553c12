#!/usr/bin/env bash
# All that is measured on one GPU, in one go: the tests that need one, then a 9B-shaped Qwen3.5 with random weights
# whose drafts are right with a set chance. What a round, or a step of training, costs does not depend on the weights.
#
#   inference/benchmarks/gpu.sh RESULTS_DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
results=${1:?usage: gpu.sh RESULTS_DIR}
mkdir -p "$results"
export PYTHONUNBUFFERED=1

python -m pytest -q -m gpu tests 2>&1 | tee "$results/tests.txt"

bench() {
    local name=$1
    shift
    python -m mtp_inference.bench --shape 9b --device cuda --dtype bfloat16 --out "$results/$name.json" "$@" \
        | tee "$results/$name.txt"
}
bench decode --accept 0.8 --depths 0,1,2,3,5,7 --batches 1,4,16 --prompt-lengths 32,2048 --new-tokens 128 --repeats 3
bench transformers --accept 0.8 --depths 0,3 --batches 1 --prompt-lengths 32 --new-tokens 128 --against transformers
bench prefill --depths 0,3 --batches 1 --prompt-lengths 2048,16384 --new-tokens 8 --prefill
python inference/benchmarks/rollback.py --device cuda --rows 1,4,16 --window 2,4,8 --heads 32 --key-heads 16 \
    --key-width 128 --value-width 128 --layers 24 | tee "$results/rollback.txt"

train() {
    local name=$1
    shift
    python inference/benchmarks/training.py --device cuda --tokens 8192 --seq-len 2048 "$@" \
        | tee "$results/training-$name.txt"
}
train 9b --shape 9b
train demo --model demo:base
