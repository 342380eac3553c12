#!/usr/bin/env bash
# All that is measured on one GPU: the tests that need one; a 9B-shaped Qwen3.5 with random weights whose drafts are right
# with a set chance (what a round, or a step of training, costs does not depend on the weights); and the study of a fine-tune
# on a pair of models trained here from the source of installed Python packages.
#
#   inference/benchmarks/gpu.sh RESULTS_DIR [tests|decode|transformers|prefill|rollback|training|study ...]
#
# Without names all parts run, in that order; one that fails does not stop the others.
set -euo pipefail
results=${1:?usage: gpu.sh RESULTS_DIR [PART ...]}
shift
mkdir -p "$results"
results=$(cd "$results" && pwd)
script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/gpu.sh
cd "$(dirname "$script")/../.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/inference${PYTHONPATH:+:$PYTHONPATH}"

bench() {
    local name=$1
    shift
    python -m mtp_inference.bench --shape 9b --device cuda --dtype bfloat16 --out "$results/$name.json" "$@" \
        | tee "$results/$name.txt"
}

train() {
    local name=$1
    shift
    python inference/benchmarks/training.py --device cuda --tokens 8192 --seq-len 2048 "$@" \
        | tee "$results/training-$name.txt"
}

part_tests() {
    # By name: the others import packages that a machine for measuring may lack.
    python -m pytest -q -m gpu tests/parity/test_{decoder_gpu,triton_rows}.py 2>&1 | tee "$results/tests.txt"
}

part_decode() {
    bench decode --accept 0.8 --depths 0,1,2,3,5,7 --batches 1,4,16 --prompt-lengths 32,2048 --new-tokens 128 --repeats 3
}

part_transformers() {
    bench transformers --accept 0.8 --depths 0,3 --batches 1 --prompt-lengths 32 --new-tokens 128 --against transformers
}

part_prefill() {
    bench prefill --depths 0,3 --batches 1 --prompt-lengths 2048,16384 --new-tokens 8 --prefill
}

part_rollback() {
    python inference/benchmarks/rollback.py --device cuda --rows 1,4,16 --window 2,4,8 --heads 32 --key-heads 16 \
        --key-width 128 --value-width 128 --layers 24 | tee "$results/rollback.txt"
}

part_training() {
    train 9b --shape 9b
    train 9b-triton --shape 9b --rows triton
    train 9b-flex --shape 9b --attention flex
    train demo --model demo:base
}

part_study() {
    local work
    work=$(mktemp -d)
    python scripts/make_demo.py base finetune check texts --size large --device cuda --work "$work" \
        | tee "$results/study-models.txt"
    cp "$work"/*.json "$results"
    python -m mtp_train run recipes/vanilla_vs_distill.yaml run_dir="$work/study" track.wandb=off \
        model.trunk="$work/finetune" model.head_from="$work/base" data.sources.0.path="$work/prompts.jsonl" \
        study.vanilla_sources="[$work/code.jsonl]" train.max_steps=200 train.tokens_per_step=12288 train.lr=1.5e-3 \
        train.micro_batch_sequences=8 study.drift.fine_tune.lr=5e-4 evaluate.prompts=64 | tee "$results/study.txt"
    cp -r "$work"/study/{report.json,report.html,acceptance.csv,comparisons.csv,figures,outcome.json} "$results"
    rm -r "$work"
}

if [[ $# == 1 ]]; then
    [[ $(type -t "part_$1") == function ]] || { echo "gpu.sh: no part $1; see its first lines" >&2; exit 2; }
    "part_$1"
    exit
fi
[[ $# -gt 0 ]] || set -- tests decode transformers prefill rollback training study
failed=()
for part in "$@"; do
    # A process of its own: what fails in one part costs none of the others.
    "$script" "$results" "$part" || failed+=("$part")
done
[[ ${#failed[@]} == 0 ]] || { echo "gpu.sh: failed: ${failed[*]}" >&2; exit 1; }
