#!/usr/bin/env bash
# Measures this project on a GPU, and writes one text file to send to us. Nothing is downloaded but Python packages.
#   bash scripts/gpu_check.sh              # at most 10 minutes once packages are installed; Ctrl-C keeps what it has
#   GPU_CHECK_DEVICE=cpu GPU_CHECK_SIZES=tiny bash scripts/gpu_check.sh    # a rehearsal without a GPU
# About 5 GB are written below TMPDIR, or below outputs/, and deleted at the end. Every part has a limit of its own; one
# that fails or runs out of time is noted, and the next one begins.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/common.sh"
if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0"
  exit
fi
unset MODEL_PATH DATA_ROOT UNLABELLED_ROOT REWARD_NET NPROC EVAL_IMAGES SEED N_ENVS SEGMENT_BATCH OUTPUT_DIR  # the user's
unset SA2VA_RL_TERMINAL  # one line for each part is enough
ensure_environment "[quantization]" || exit
report="$PWD/gpu_check_$(date +%Y%m%d_%H%M%S).txt"
cd "$root" || exit
device="${GPU_CHECK_DEVICE:-cuda}" sizes="${GPU_CHECK_SIZES:-1b 4b}"
if [[ "$device" != cpu ]]; then
  python -c 'import torch; torch.cuda.get_device_properties(0)' 2> /dev/null || {
    echo "no GPU is visible to torch; install a CUDA build of torch $(python -c 'import torch; print(torch.__version__)'), or set CUDA_VISIBLE_DEVICES" >&2
    exit 2
  }
fi
mkdir -p "${TMPDIR:-$root/outputs}"
work="$(cd "$(mktemp -d "${TMPDIR:-$root/outputs}/gpu_check.XXXXXX")" && pwd)" || exit
model="$work/real_size" home="${HOME:-/}" python_home="$(python -c 'import sys; print(sys.base_prefix)')"
shopt -u checkwinsize  # or bash sets COLUMNS to the width of the window
export COLUMNS=160 TORCHINDUCTOR_CACHE_DIR="$work/inductor"  # wide tables; a cache whose name holds no user's name
began=$SECONDS planned=0 running="" stopped="" summary=()
trap 'rm -rf "$work"' EXIT
trap 'stopped=yes; [[ -z "$running" ]] || kill -INT "$running"' INT TERM

clean() {  # stdin, without progress bars, empty lines and names of folders
  local text tilde="~"
  text="$(tr -d '\0' | tr '\r' '\n' | grep -av -e '%|' -e '^ *$' | tail -n 150)"
  text="${text//"$work"/WORK}" text="${text//"$root"/.}" text="${text//"$VIRTUAL_ENV"/VENV}"
  [[ "$home" == / ]] || text="${text//"$home"/"$tilde"}"
  [[ "${python_home:-/usr}" == /usr ]] || text="${text//"$python_home"/PYTHON}"
  printf '%s\n' "$text"
}

run_limited() {  # $1: seconds, $2...: command -> status
  set -m  # or a job in the background ignores Ctrl-C; it is there because bash handles signals only while it waits
  timeout --signal INT --kill-after 20 "$@" > "$work/output" 2>&1 < /dev/null &
  running=$!
  set +m
  [[ -z "$stopped" ]] || kill -INT "$running"  # Ctrl-C while it began
  wait "$running"
  status=$?
  while kill -0 "$running" 2> /dev/null; do  # Ctrl-C ended the wait, not yet the part
    wait "$running"
    status=$?
  done
  running=""
}

result() {  # $1: exit status, $2: seconds, $3: seconds at most
  if [[ -n "$stopped" ]]; then echo "interrupted"
  elif (($1 == 0)); then echo "ok"
  elif (($1 == 124 || ($1 == 137 && $2 >= $3))); then echo "out of time"
  elif (($1 == 137)); then echo "failed (killed; did main memory run out?)"
  else echo "failed"; fi
}

part() {  # $1: title, $2: seconds at most, besides those that earlier parts left over; $3...: command
  local title="$1" limit start=$SECONDS status=0 told="no time left"
  [[ -z "$stopped" ]] || finish
  planned=$((planned + $2)) limit=$((began + planned - SECONDS))
  shift 2
  echo "$title ..."
  : > "$work/output"
  if ((limit >= 10)); then
    run_limited "$limit" "$@"
    told="$(result "$status" $((SECONDS - start)) "$limit"), $((SECONDS - start)) s"
  fi
  summary+=("$title: $told")
  { echo "== $title: $*" | clean; clean < "$work/output"; echo "-- $told, exit status $status"; echo; } >> "$report"
  [[ -z "$stopped" ]] || finish
}

finish() {
  { echo "== summary"; printf '%s\n' "${summary[@]}"; } | tee -a "$report"
  echo "report: $report"
  [[ -z "$stopped" ]] || exit 130
  exit 0
}

free_gb() { df -Pk "$work" | awk 'NR == 2 { print int($4 / 1000000) }'; }

machine() {
  echo "== machine"
  git rev-parse HEAD 2> /dev/null || python -c 'import rl_reward_network; print(rl_reward_network.__version__)'
  [[ "$device" == cpu ]] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
  python -c 'import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__, torch.cuda.is_available())'
  echo "$(nproc) cores, $(free_gb) GB of disk are free"
  free -g
  echo
}

stages() {  # $1: size, $2: seconds, $3...: flags; the rendered data stay for the next size
  local size="$1" limit="$2"
  shift 2
  rm -rf "${model:?}"/{model,bank,grpo,supervised,merged}
  part "stages, $size" "$limit" python -m benchmarks.speed real_size --size "$size" --device "$device" --folder "$model" --keep "$@"
}

flag=$([[ "$device" == cpu ]] && echo -1 || echo 0)
first="${sizes%% *}" quick=(--parts formats decoding)
gpu=(python -m benchmarks.speed gpu --device "$device")
prompts=(python -m benchmarks.segment --model_path "$model/model" --image docs/pictures/demo.png --device "$device" --max_new_tokens 24 --repeats 3)
read -r -a every <<< "$sizes"

machine 2>&1 | clean >> "$report"
part "training in one process, $sizes" 220 python -m benchmarks.speed gpu_training --device "$device" --sizes "${every[@]}" --max_seconds 180
part "number formats, decoding, nano" 60 "${gpu[@]}" "${quick[@]}"
stages "$first" 110 --stages write load segment "mask bank"
part "batched prompts against single calls, $first" 45 "${prompts[@]}"
part "one GRPO step against the usual layout" 45 python -m benchmarks.speed grpo_step --device "$device"
part "GRPO, quick" 120 env GPU="$flag" OUTPUT_DIR="$work/outputs" bash run_rl_train.sh quick
finish
