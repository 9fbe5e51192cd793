#!/usr/bin/env bash
# Measures this project on a GPU, and writes one text file to send to us. Nothing is downloaded but Python packages.
#   bash scripts/gpu_check.sh              # at most 30 minutes
#   GPU_CHECK_DEVICE=cpu GPU_CHECK_SIZES=tiny bash scripts/gpu_check.sh    # a rehearsal without a GPU
# Every part has a limit of its own; one that fails or runs out of time is noted, and the next one begins.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/common.sh"
if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  exit
fi
ensure_environment "[test]"
report="$PWD/gpu_check_$(date +%Y%m%d_%H%M%S).txt" end=$((SECONDS + 1800))
cd "$root"
device="${GPU_CHECK_DEVICE:-cuda}" sizes="${GPU_CHECK_SIZES:-1b 4b}"
[[ "$device" == cpu ]] || python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "no GPU is visible to torch; install a CUDA build of torch $(python -c 'import torch; print(torch.__version__)'), or set CUDA_VISIBLE_DEVICES" >&2
  exit 2
}
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

part() {  # $1: title, $2: seconds at most, $3...: command
  local title="$1" limit="$2" left=$((end - SECONDS)) start=$SECONDS status
  shift 2
  ((limit < left)) || limit=$left
  echo "$title ..."
  {
    echo "== $title: $*"
    if ((limit < 10)); then
      echo "no time left"
    else
      timeout --signal INT --kill-after 20 "$limit" "$@" > "$work/output" 2>&1
      status=$?
      tr '\r' '\n' < "$work/output" | grep -v '%|' | sed "s|$work|WORK|g; s|$root|.|g; s|${HOME:-$root}|~|g" | tail -n 60  # no bars, no names of folders
      echo "-- exit status $status after $((SECONDS - start)) s$( ((status != 124)) || echo ", out of time")"
    fi
    echo
  } >> "$report"
}

model="$work/real_size"
flag=$([[ "$device" == cpu ]] && echo -1 || echo 0)
part "machine" 30 bash -c 'git rev-parse HEAD; nvidia-smi; python -c "import platform, torch, transformers; print(platform.python_version(), torch.__version__, transformers.__version__, torch.cuda.is_available())"; nproc; free -g'
part "number formats, tokens per second, out of memory" 180 python -m benchmarks.gpu --device "$device"
for size in $sizes; do
  part "stages, $size" 420 python -m benchmarks.real_size --size "$size" --device "$device" --folder "$model" --keep
  part "predicted memory, $size" 120 python -m rl_reward_network.cli doctor --memory --model_path "$model/model" --device "$device" --max_completion_length 24
  part "batched prompts against single calls, $size" 180 python -m benchmarks.segment --model_path "$model/model" --image docs/demo.png --device "$device" --max_new_tokens 24 --repeats 3
  rm -rf "$model"
done
part "float32, ${sizes%% *}" 240 python -m benchmarks.real_size --size "${sizes%% *}" --device "$device" --dtype float32 --folder "$model" --stages write load segment "GRPO step"
part "one GRPO step against the usual layout" 120 python -m benchmarks.grpo_step --device "$device"
part "step 2, quick" 420 env GPU="$flag" OUTPUT_DIR="$work/outputs" bash run_step2_finetune.sh quick
part "GRPO, quick" 420 env GPU="$flag" OUTPUT_DIR="$work/outputs" bash run_rl_train.sh quick
part "tests" 900 python -m pytest -q -x tests/models tests/grpo tests/rewards tests/env
echo "report: $report"
