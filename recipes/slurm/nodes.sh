#!/usr/bin/env bash
# Runs a recipe on several nodes under Slurm, with one launcher on each node. Activate the environment that has mtp-train,
# go to the directory that the recipe's relative paths start at, which all nodes must share, and submit:
#   sbatch recipes/slurm/nodes.sh my-27b.yaml [section.field=value ...]
# After a failure, a time limit or a preemption, the same command resumes the run.
#SBATCH --job-name=mtp-train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# After the loss of a node Slurm starts the job again, on other nodes.
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time limit: training saves its state, and stops.
#SBATCH --signal=TERM@120
set -euo pipefail

accelerate_file=$(python -c '
import mtp_train
print(*(one.path for one in mtp_train.recipes().accelerate if one.name == "fsdp2_nodes"))')
main_address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a node get different ports.
main_port=$((20000 + SLURM_JOB_ID % 10000))
num_processes=$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-8}))
export accelerate_file main_address main_port num_processes

# --kill-on-bad-exit: where the launcher of one node fails, processes of the others may wait for it.
# --wait=0: the other nodes are done before the first one, which writes the report and the export.
# The single quotes leave SLURM_NODEID to each node's own shell.
srun --kill-on-bad-exit=1 --wait=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} bash -c '
  exec accelerate launch --config_file "$accelerate_file" \
    --num_machines "$SLURM_NNODES" --num_processes "$num_processes" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$main_address" --main_process_port "$main_port" \
    -m mtp_train "$@"' launcher "$@"
