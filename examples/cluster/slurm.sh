#!/bin/bash
#SBATCH --job-name=tables
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # processes a host: one for each GPU
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue               # a host that fails
#SBATCH --open-mode=append

# Run from a folder that all hosts see: sbatch slurm.sh

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0   # where the name of a host is not an address of the fast network

# The variables of a process are known where it runs.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c \
  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec python train.py run' && exit

# A process that died has ended the others: begin again, from the last checkpoint.
((${SLURM_RESTART_COUNT:-0} < 3)) && scontrol requeue "$SLURM_JOB_ID"
exit 1
