#!/bin/bash
# The rows of the README, the serving table and batches on one GPU, in 40 minutes. The same command goes on with what is
# left: a part that has finished has a file DONE, and one that ran out of time goes on from its own results.
#
#     benchmarks/gpu_day.sh gpu-day                                    # a GPU; VLLM=../vllm/bin/python for the serving table
#     TINY=1 DEVICE=cpu benchmarks/gpu_day.sh gpu-day-tiny             # a rehearsal on a CPU with tiny sizes
#
# DATA (default data/) is the folder of benchmarks/README.md. A part whose files or packages are missing, or
# that fails, is named at the end, and the exit code is then 1.
set -u
out=$(realpath -m "${1:?give the folder of the results}")
here=$(cd "$(dirname "$0")" && pwd)
device=${DEVICE:-cuda} data=${DATA:-data} vllm=${VLLM:-} tiny=${TINY:-} failed=()
mkdir -p "$out"

# part NAME MINUTES COMMAND...: run a command in its own folder, once, for at most so many minutes.
part() {
    local name=$1 minutes=$2
    shift 2
    [ -e "$out/$name/DONE" ] && return
    mkdir -p "$out/$name"
    echo "$name: $*"
    if (cd "$out/$name" && timeout "$((minutes * 60 * slower))" "$@") > "$out/$name/log.txt" 2>&1; then
        touch "$out/$name/DONE"
    else
        failed+=("$name (exit code $?, see $out/$name/log.txt)")
    fi
}

if [ -n "$tiny" ]; then
    shape=tiny pages=expedition seeds=0 facts=2 rounds=1
    model=smollm2 slower=5
else
    shape=qwen3-0.6b pages=lighthouse,expedition,ferry,foundry,garden,theatre seeds=0,1,2 facts=12,50,200
    rounds=3
    model=smollm2 slower=1
fi
dtype=$([ "$device" = cpu ] && echo float32 || echo bfloat16)

# Fast parts first: what the last ones lack of the 40 minutes, the next call gives them.
part study_batches 3 python "$here/study_batches.py" --device "$device" --rounds "$([ -n "$tiny" ] && echo 1 || echo 20)"
part overhead 3 python "$here/overhead.py" --shapes "$shape" --device "$device" --dtype "$dtype" --rounds "$rounds"
part memories 3 python "$here/many_memories.py" --shape "$shape" --device "$device" --dtype "$dtype" --rounds "$rounds" \
    --memories "$([ -n "$tiny" ] && echo 4 || echo 50)" --steps "$([ -n "$tiny" ] && echo 1 || echo 5)"
rule=(--model locas_peft/tinybook-mlp --method none,locas-mlp --init write --update ridge --device "$device" --out rule)
if [ -n "$tiny" ]; then
    part rule 2 python -m locas_peft eval perplexity "$here/pages/expedition.txt" "${rule[@]}" --max-tokens 200
else
    part rule 4 python -m locas_peft eval perplexity "$(realpath "$data/pg19/eval")" "${rule[@]}" --max-tokens 30000
    part books 15 python "$here/paper.py" "$model" --data "$(realpath "$data")" --scale gpu --table sweep,pg19,mmlu \
        --device "$device" --dtype "$dtype" --out paper
    part pages 10 python "$here/selfstudy.py" --model "$model" --seeds "$seeds" --pages "$pages" --out pages.json
    part facts 8 python "$here/capacity.py" --model "$model" --facts "$facts" --out capacity.json
fi

# Serving: a page is studied, or read where the sizes are tiny, exported, and asked for in vLLM's environment.
if [ -n "$tiny" ]; then
    stage=(read --r 8 --window 64 --stride 32 --anchor 0 --max-tokens 200)
else
    stage=(study --model "$model")
fi
part taught 3 python -m locas_peft "${stage[@]}" "$here/pages/expedition.txt" --device "$device" --library users
if [ -n "$vllm" ]; then
    part exported 2 python -m locas_peft export "$out/taught/users/expedition" --dtype "$dtype" --out served
    part serving 5 "$vllm" "$here/serving.py" "$out/exported/served/base" --adapter "$out/exported/served/adapter" \
        --json serving.json
    part named 5 python "$here/../examples/serving/vllm_server.py" "$out/taught/users" --vllm-python "$vllm"
fi

for each in "${failed[@]}"; do echo "failed: $each"; done
[ ${#failed[@]} -eq 0 ] && echo "all parts are in $out"
