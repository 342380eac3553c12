#!/usr/bin/env bash
# Test and measure on a GPU, in 27 minutes at most: every part in a process of its own with a time limit.
#
#   scripts/measure_gpu.sh                          every part
#   scripts/measure_gpu.sh --parts machine,profile  some of them, as where one command may take ten minutes
#   scripts/measure_gpu.sh --device cpu             a rehearsal on the demo, without a GPU
#   scripts/measure_gpu.sh --limits                 the parts and their limits in seconds
#   scripts/measure_gpu.sh --wheels                 packages that images with torch, transformers and peft may lack
#
# --out DIR (runs/gpu) gets PART.json and PART.log as each part ends. A part that fails or runs out of time costs no
# other one. --limit SECONDS replaces all limits. --work DIR (a temporary directory) gets runs and exports: `engine`
# reads the head that `real` trained, so name one where these parts run in several calls. Further arguments go to
# inference/benchmarks/gpu.py, which without --model measures random weights of the shape of Qwen3.5-9B. `real` trains a
# head for the checkpoint MTP_REAL_MODEL, such as SmolLM2-135M-Instruct. PYTHON is the interpreter (python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=machine,profile,step,contexts,tests,fsdp2,offload,real,engine,published
limit_of() {
    case $1 in
        machine | engine | published) echo 120 ;;
        profile | step) echo 240 ;;
        contexts) echo 180 ;;
        tests) echo 90 ;;
        fsdp2) echo 60 ;;
        offload) echo 30 ;;
        real) echo 420 ;;
        *) return 1 ;;
    esac
}

chosen=$parts device=cuda out=runs/gpu limit="" work="" more=()
while [ $# -gt 0 ]; do
    case $1 in
        --parts) chosen=$2 && shift ;;
        --device) device=$2 && shift ;;
        --out) out=$2 && shift ;;
        --limit) limit=$2 && shift ;;
        --work) work=$2 && shift ;;
        --limits)
            for part in ${parts//,/ }; do echo "$part $(limit_of "$part")"; done
            exit
            ;;
        --wheels)
            printf '%s\n' pydantic pydantic-core annotated-types typing-inspection filelock datasets dill multiprocess \
                gguf flash-linear-attention fla-core einops
            exit
            ;;
        *) more+=("$1") ;;
    esac
    shift
done
for part in ${chosen//,/ }; do
    if ! limit_of "$part" > /dev/null; then
        echo "--parts: $part; expected some of $parts" >&2
        exit 2
    fi
done

python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/inference${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} PYTHONUNBUFFERED=1
if [ -z "$work" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$out" "$work"
trap 'kill "$!" 2> /dev/null; exit 130' INT TERM
steps=2000 questions=1600
if [ "$device" = cpu ]; then
    steps=4 questions=24
    small=(--new-tokens 8 --repeats 1 --train-tokens 64 --seq-len 32 --batches 1 2 --contexts 48 96)
    more=("${small[@]}" "${more[@]+"${more[@]}"}")
elif [[ " ${more[*]-} " != *" --model "* ]]; then
    more=(--config inference/benchmarks/qwen3_5_9b.json "${more[@]+"${more[@]}"}")
fi

# Stages of scripts/real_model.py; the figures are printed before the comparison too, which may run out of time.
real='set -e; for stage in prompts "train train.max_steps=$4" record compare record; do
    "$1" scripts/real_model.py $stage --model "$2" --out "$3" --questions "$5"
done'
# The server of vLLM with the head, measured beside our decoder.
engine='vllm serve "$2" --port 8199 --max-model-len 4096 --gpu-memory-utilization 0.4 --speculative-config \
    "{\"method\": \"eagle3\", \"model\": \"$3/eagle3/export\", \"num_speculative_tokens\": 3}" >&2 & trap "kill $!" EXIT
until curl -sf http://localhost:8199/health > /dev/null; do sleep 1; done
"$1" -m mtp_train evaluate "$3/eagle3" --endpoint http://localhost:8199/v1 --prompts-per-task 2 --out "$3/served" \
    --json'

# Set `command` to that of a part, or `skipped` to the reason why it cannot run here.
plan() {
    local model=${MTP_REAL_MODEL:-}
    command=() skipped=""
    case $1 in
        tests) command=("$python" -m pytest tests/parity -m gpu -n 4 --dist loadfile -q -p no:cacheprovider) ;;
        fsdp2)
            command=("$python" -m accelerate.commands.launch --config_file recipes/accelerate/fsdp2.yaml
                --num_processes 1 -m mtp_train run retrain_head --json "run_dir=$work/fsdp2")
            [ "$device" != cpu ] || skipped="accelerate shards on GPUs only"
            ;;
        real)
            command=(bash -c "$real" real "$python" "$model" "$work" "$steps" "$questions")
            [ -n "$model" ] || skipped="MTP_REAL_MODEL names no checkpoint"
            ;;
        engine)
            command=(bash -c "$engine" engine "$python" "$model" "$work")
            [ -d "$work/eagle3/export" ] || skipped="the part real exported no head to --work"
            command -v vllm > /dev/null || skipped="vllm is not installed"
            ;;
        *) command=("$python" inference/benchmarks/gpu.py --parts "$1" --device "$device" "${more[@]}") ;;
    esac
}

# Write PART.json: the last line of the output that is a JSON document, whatever became of the part after it.
record='import json, sys
part, status, code, seconds, reason, output, target = sys.argv[1:]
result, lines = None, open(output, errors="replace").read().splitlines() if output else []
for line in reversed(lines):
    if line.startswith("{"):
        try:
            result = json.loads(line)
            break
        except ValueError:
            continue
found = {"part": part, "status": status, "exit_status": int(code), "seconds": int(seconds), "reason": reason,
         "last_line": lines[-1][:500] if lines and result is None else None, "result": result}
open(target, "w").write(json.dumps(found) + "\n")'

failed=0
for part in ${chosen//,/ }; do
    plan "$part"
    code=0 status=skipped output=""
    SECONDS=0
    if [ -z "$skipped" ]; then
        output=$work/$part.out
        timeout -k 10 "${limit:-$(limit_of "$part")}" "${command[@]}" > "$output" 2> "$out/$part.log" &
        wait $! || code=$?
        cat "$output" >> "$out/$part.log"
        case $code in
            0) status="done" ;;
            124 | 137) status="timed out" ;;
            *) status=failed ;;
        esac
        [ "$code" = 0 ] || failed=1
    fi
    "$python" -c "$record" "$part" "$status" "$code" "$SECONDS" "$skipped" "$output" "$out/$part.json"
    echo "$part: $status${skipped:+ ($skipped)}, $SECONDS s"
done
exit $failed
