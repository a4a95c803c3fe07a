#!/bin/sh
# The two-rank experiment on as many GPUs as there are, in under nine minutes: one table, and a JSON line for each result.
#
#     bench/tp.sh [FILE] [options of python -m bireme.bench.tp]
#
# PYTHON names the interpreter (default: the one of .venv if there is one, else python3). Servers log to FILE.log.
set -eu
cd "$(dirname "$0")/.."
out=${1:-bench/results/tp.jsonl}
[ $# -eq 0 ] || shift
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
# NVLink multicast stays off: a fault there can take a whole host's GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$(dirname "$out")"
exec "$PYTHON" -m bireme.bench.tp --out "$out" --log "$out.log" "$@"
