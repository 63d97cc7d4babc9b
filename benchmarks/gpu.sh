#!/bin/bash
# The tables of speed.py on one GPU, plain and compiled, in about ten minutes: each row is printed when it is measured.
#
#     benchmarks/gpu.sh OUT                                   # Qwen3-0.6B's shapes
#     SHAPES=qwen3-1.7b benchmarks/gpu.sh OUT
#     SHAPES=tiny DEVICE=cpu QUICK=--quick benchmarks/gpu.sh OUT    # a rehearsal on a CPU
#
# A part that fails or takes longer than its time is named at the end, and the exit code is then 1.
set -u
out=$(realpath -m "${1:?give the folder of the results}")
here=$(cd "$(dirname "$0")" && pwd)
shapes=${SHAPES:-qwen3-0.6b} device=${DEVICE:-cuda} quick=${QUICK:-}
failed=()

# part MINUTES OPTION...: run speed.py for at most so many minutes.
part() {
    local minutes=$1
    shift
    timeout "$((minutes * 60))" python "$here/speed.py" --shapes "$shapes" --device "$device" --out "$out" $quick "$@" ||
        failed+=("speed.py $* (exit code $?)")
}

part 4
part 4 --compile --quick
part 2 --quick --prompt-tokens 8192

for each in "${failed[@]}"; do echo "failed: $each"; done
[ ${#failed[@]} -eq 0 ] && echo "all parts are in $out"
