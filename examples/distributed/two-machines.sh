#!/usr/bin/env bash
# Train on two machines. Start this same line on both; FIRST is one of them, by a name or address that both can reach.
# RUN_FOLDER is on a disk that both see.
#
#   FIRST=node1 two-machines.sh EXPERIMENT RUN_FOLDER [OPTIONS OF eqprop train]
set -euo pipefail
experiment=$1 out=$2
shift 2

if [ -e "$out/experiment.json" ]; then
  command=(resume "$out" --device "${DEVICE:-cuda}")
else
  command=(train "$experiment" --out "$out" --device "${DEVICE:-cuda}" "$@")
fi
exec torchrun --nnodes 2 --nproc-per-node "${PROCESSES:-gpu}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$FIRST:${PORT:-29400}" --rdzv-id "${JOB:-eqprop}" \
  -m -- eqprop "${command[@]}"
