#!/usr/bin/env bash
# The whole story on the two tiny checkpoints the package carries: stripped, grafted, retrained, measured, exported.
# Needs no network once installed. Anything further overrides the recipe:
#
#   scripts/demo.sh run_dir=runs/mine train.max_steps=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment

# One thread: for models this small, threads wait for each other longer than they work.
threads=${OMP_NUM_THREADS:-1}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

exec accelerate launch --quiet --config_file recipes/accelerate/single.yaml --num_cpu_threads_per_process "$threads" \
    -m mtp_train recipes/retrain_head.yaml "$@"
