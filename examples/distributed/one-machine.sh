#!/usr/bin/env bash
# Train in one process per GPU of this machine; a process that dies is started again, and the run continues.
#
#   one-machine.sh EXPERIMENT RUN_FOLDER [OPTIONS OF eqprop train]
#   PROCESSES=4 DEVICE=cpu one-machine.sh P-1h runs/p1h --trials 8
set -euo pipefail
experiment=$1 out=$2
shift 2

if [ -e "$out/experiment.json" ]; then
  command=(resume "$out" --device "${DEVICE:-cuda}")
else
  command=(train "$experiment" --out "$out" --device "${DEVICE:-cuda}" "$@")
fi
# After -m --, torchrun leaves every option to eqprop.
exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" --max-restarts 3 -m -- eqprop "${command[@]}"
