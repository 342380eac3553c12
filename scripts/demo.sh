#!/usr/bin/env bash
# The whole story on the two tiny checkpoints the package carries: stripped, grafted, retrained, measured, exported.
# Needs no network once installed. Anything further overrides the recipe:
#
#   scripts/demo.sh run_dir=runs/mine train.max_steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment

# A process for each of two cores, of one thread: for models this small, threads wait for each other longer than they
# work. On a GPU, or a single core, one process.
threads=${OMP_NUM_THREADS:-1}
machine=single
if [[ $(getconf _NPROCESSORS_ONLN) -ge 2 && ! -e /dev/nvidia0 ]]; then
    machine=cpu_ddp
    export ACCELERATE_USE_CPU=true
fi
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

exec accelerate launch --quiet --config_file "recipes/accelerate/$machine.yaml" \
    --num_cpu_threads_per_process "$threads" -m mtp_train recipes/retrain_head.yaml "$@"
