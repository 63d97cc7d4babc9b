#!/usr/bin/env bash
# Teach a table on a Slurm cluster: the nodes share it, in a folder that all of them see with file locks.
# A job that is requeued goes on; the same command again finishes what is left.
#     sbatch examples/cluster/slurm.sh notes.jsonl /shared/users --model smollm2
# The texts are studied; the verb `read` in place of `study` reads them.
# Checked by shellcheck 0.11 and `bash -n`, not on a cluster.
#SBATCH --job-name=locas
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail
PROCESSES_PER_NODE=2
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / PROCESSES_PER_NODE))
address="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# Each node has its own number, which `srun` puts into SLURM_NODEID.
# shellcheck disable=SC2016
exec srun bash -c 'exec accelerate launch --multi_gpu --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
    --num_processes "$((SLURM_NNODES * $0))" --main_process_ip "$1" --main_process_port 29500 \
    -m locas_peft study --manifest "$2" --library "$3" "${@:4}"' \
    "$PROCESSES_PER_NODE" "$address" "$1" "$2" "${@:3}"
