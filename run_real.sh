#!/usr/bin/env bash
# What training gains on your model and your images: four trainings and their tests, and a folder that can be sent.
#   bash run_real.sh MODEL DATA [quick|full]                                            without a mode: full
# Environment: OUTPUT_DIR GPU SEED. The same command goes on after an interruption.
#   -> $OUTPUT_DIR/real_MODEL_DATA_MODE/share/: table, versions, numbers for each test item under a pseudonym, curves, minutes,
#      GiB; no image, no path and no name. The runs and their reports, with images, are beside it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
if [[ $# -lt 2 || "$1" == -* ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
model="$1" data="$2" mode="${3:-full}"
check_mode "$mode" run_real.sh
[[ -d "$data" ]] || { echo "$data: no such folder; give a folder of images with masks (sa2va-rl data import)" >&2; exit 2; }
check_gpu
show_one_gpu
ensure_environment ""
place="${OUTPUT_DIR:-outputs}/real_$(basename "$model")_$(basename "$data")_$mode"
share="$place/share"
mkdir -p "$share" || { echo "set OUTPUT_DIR to a folder of yours" >&2; exit 2; }
flags=(--data_root "$data" --output_dir "$place" ${GPU:+--gpu "$GPU"} ${SEED:+--seed "$SEED"})

train() {  # $1: name of the run; then flags of sa2va-rl grpo
  local run="$place/$1"
  shift
  if [[ ! -e "$run/done.json" ]]; then
    local resume=()
    [[ ! -e "$run/config.json" ]] || resume=(--resume)
    run_command grpo "$mode" "${flags[@]}" --run_folder "$run" "$@" ${resume[@]+"${resume[@]}"}
  fi
  [[ -e "$run/evaluation/eval.json" ]] || run_command evaluate --model_path "$run/final_model" ${GPU:+--gpu "$GPU"}
  mkdir -p "$share/$(basename "$run")"
  cp "$run"/evaluation/eval.{json,csv} "$run"/{metrics,timings}.jsonl "$run/cost.json" "$share/$(basename "$run")"
}

{
  run_command doctor --dataset_name annotations --data_root "$data" --model_path "$model"
  run_command env > "$share/versions.txt"
  train supervised --model_path "$model" --objective supervised
  train side_network --model_path "$model" --objective supervised --side_network
  merged="$place/side_network/merged"
  [[ -e "$merged" ]] || run_command merge --model_path "$place/side_network/final_model" --output "$merged"
  train mean_teacher --model_path "$merged" --objective mean_teacher
  train grpo --model_path "$merged" --loop2_iou_weight 1
  run_module scripts.gains "$share"
} 2>&1 | tee -ia "$place/log.txt"
echo "to share: $share"
