#!/usr/bin/env bash
# Teach a table on a Slurm cluster: eight tasks share it, in a folder that all nodes see with file locks.
# A task that is requeued goes on; the same command again finishes what is left.
#     sbatch examples/cluster/slurm.sh notes.jsonl /shared/users --model smollm2 --study
# Checked by shellcheck 0.11 and `bash -n`, not on a cluster.
#SBATCH --job-name=locas
#SBATCH --array=0-7
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A-%a.log
set -euo pipefail
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
exec locas memorize --manifest "$1" --library "$2" "${@:3}"
