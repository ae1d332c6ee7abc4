#!/usr/bin/env bash
# Everything that only a real NVIDIA GPU can tell, in under eight minutes: bench/device.sh [DIR] [SECTION...]
#
# Numerics of every GPU kernel, attention and quantised products against the machine's own ceilings, the whole step of an
# 8B model. Each section is a process with a time limit: what hangs or fails there costs the others nothing. Tables end
# the output; DIR holds the logs and device.json. QUICK=1 shrinks all shapes for a machine without a GPU. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-results/device}
shift || true
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=3
# PyTorch is measured beside us and needs some of the memory.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.7}

declare -A limits=([ceilings]=25 [numerics]=100 [products]=50 [decode_variants]=50 [decode]=80 [prefill]=70 [step]=100)
sections=("$@")
if [[ ${#sections[@]} -eq 0 ]]; then sections=(ceilings numerics products decode_variants decode prefill step); fi

mkdir -p "$out"
for section in "${sections[@]}"; do
    timeout --kill-after=3 "${LIMIT:-${limits[$section]}}" \
        "$python" -m bench.device "$section" --out "$out" ${QUICK:+--quick} >"$out/$section.log" 2>&1
    status=$?
    echo "$section: exit $status"
    if [[ $status -ne 0 ]]; then tail -n 15 "$out/$section.log"; fi
done
"$python" -m bench.device report --out "$out"
