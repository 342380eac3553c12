#!/usr/bin/env bash
# Graft, retrain, measure and export the head of the demo: two tiny checkpoints in the package, one of them stripped.
# Needs no network once installed. Further arguments override fields of the recipe:
#
#   scripts/demo.sh run_dir=runs/mine train.max_steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment

# Two processes of one thread each: threads of one process spend most of their time in synchronisation for models this
# small. One process on a GPU, or with a single core.
threads=${OMP_NUM_THREADS:-1}
machine=single
if [[ $(getconf _NPROCESSORS_ONLN) -ge 2 && ! -e /dev/nvidia0 ]]; then
    machine=cpu_ddp
    export ACCELERATE_USE_CPU=true
fi
# OMP_NUM_THREADS=1 of a launched process counts as the launcher's default.
export MKL_NUM_THREADS=$threads
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

exec accelerate launch --quiet --config_file "recipes/accelerate/$machine.yaml" \
    --num_cpu_threads_per_process "$threads" -m mtp_train recipes/retrain_head.yaml "$@"
