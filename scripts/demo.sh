#!/usr/bin/env bash
# The whole story on the two tiny checkpoints the package carries: stripped, grafted, retrained, measured, exported.
# Needs no network once installed. Anything further overrides the recipe:
#
#   scripts/demo.sh run_dir=runs/mine train.max_steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment

# Models this small gain nothing beyond four threads. Passive waiting: on a busy machine, threads that spin for each
# other make two threads several times slower than one.
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
threads=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

exec accelerate launch --quiet --config_file recipes/accelerate/single.yaml --num_cpu_threads_per_process "$threads" \
    -m mtp_train recipes/retrain_head.yaml "$@"
