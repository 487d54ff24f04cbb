#!/usr/bin/env bash
# Two machines under torchrun. On each machine:
#
#     MASTER_ADDR=first-machine NODE_RANK=0 RANKS_PER_NODE=8 ACCELERATOR=gpu ./torchrun.sh --output /shared/traces
#     MASTER_ADDR=first-machine NODE_RANK=1 RANKS_PER_NODE=8 ACCELERATOR=gpu ./torchrun.sh --output /shared/traces
#
# Without NODE_RANK both "machines" run here, on the loopback interface, with CPU ranks. Arguments go to the training.
set -euo pipefail

python=${PYTHON:-python}
training=${TRAINING:-$(dirname "${BASH_SOURCE[0]}")/transformer_ddp.py}
ranks_per_node=${RANKS_PER_NODE:-1}

run_node() {
    local node_rank=$1
    shift
    "$python" -m torch.distributed.run \
        --nnodes 2 --node-rank "$node_rank" --nproc-per-node "$ranks_per_node" \
        --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
        "$training" --nodes 2 --devices "$ranks_per_node" --accelerator "${ACCELERATOR:-cpu}" "$@"
}

if [[ -n ${NODE_RANK:-} ]]; then
    run_node "$NODE_RANK" "$@"
else
    run_node 1 "$@" &
    second=$!
    trap 'kill "$second" 2>/dev/null || true' EXIT
    run_node 0 "$@"
    wait "$second"
fi
