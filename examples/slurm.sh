#!/usr/bin/env bash
#SBATCH --job-name=chakra
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=00:30:00
#
# One task for each GPU. From the root of the repository:
#
#     sbatch examples/slurm.sh
#     sbatch --export=ALL,TRACES=s3://bucket/traces examples/slurm.sh
#
set -euo pipefail

# All ranks publish below one folder: a file system that all machines see, or an object store.
traces=${TRACES:-$SLURM_SUBMIT_DIR/traces/$SLURM_JOB_ID}
# Raw files are large and short-lived: a local disk of the machine.
scratch=${SCRATCH:-${SLURM_TMPDIR:-/tmp}}
training=${TRAINING:-$SLURM_SUBMIT_DIR/examples/transformer_ddp.py}

# One rank of each machine is profiled; the others wait for it after the window, and not on NCCL.
ranks=${RANKS:-0-$((SLURM_NNODES * SLURM_NTASKS_PER_NODE - 1)):$SLURM_NTASKS_PER_NODE}

# --kill-on-bad-exit: if one rank dies, the others do not wait for it until a timeout.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" "$training" \
    --accelerator "${ACCELERATOR:-gpu}" --devices "$SLURM_NTASKS_PER_NODE" --nodes "$SLURM_NNODES" \
    --output "$traces" --scratch "$scratch" --ranks "$ranks"

# The command line needs neither GPU nor torch; it also reads s3:// and other fsspec URLs.
srun --nodes=1 --ntasks=1 "${PYTHON:-python}" -m lightning_chakra.cli check "$traces"
