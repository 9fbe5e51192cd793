#!/usr/bin/env bash
# GRPO: fine-tune Sa2VA's LoRA weights in two loops, and compare with the base model.
#   bash run_rl_train.sh [quick|full] [flags of sa2va-rl grpo]          without a mode: full
# Environment: MODEL_PATH DATA_ROOT UNLABELLED_ROOT REWARD_NET OUTPUT_DIR GPU SEED, EVAL_IMAGES (most test regions; all
# without it), and NPROC (processes of torchrun, one GPU each)
#   -> $OUTPUT_DIR/sa2va_grpo_<time>/ with final_model/, logs/ (TensorBoard) and evaluation/report.html
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
! help_asked "$@" || show_help grpo "$@"
mode=(full)
[[ " $* " != *" --config"[\ =]* ]] || mode=()  # that of the file
if [[ -n "${1:-}" && "$1" != -* ]]; then
  mode=("$1")
  check_mode "$1" run_rl_train.sh
  shift
fi
check_flags "$@"
processes="${NPROC:-1}"
if [[ ! "$processes" =~ ^[1-9][0-9]*$ ]]; then
  echo "NPROC is '$processes', expected the number of processes, 1 or more" >&2
  exit 2
fi
check_gpu
if [[ "$processes" -gt 1 && "${GPU:--1}" -ge 0 ]]; then
  echo "GPU=$GPU names one GPU, but NPROC=$processes takes one for each process; unset GPU, or set CUDA_VISIBLE_DEVICES" >&2
  exit 2
fi
show_one_gpu
ensure_environment ""
input_flags regions_lamplight "$@"
flags=(${mode[@]+"${mode[@]}"} "${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@")
command=(rl_reward_network.cli grpo "${flags[@]}")
LOCAL_RANK=$((processes - 1)) check_command grpo "${flags[@]}"  # the last process needs its GPU, too
[[ "$processes" -eq 1 ]] || command=(torch.distributed.run --standalone --nproc_per_node "$processes" -m "${command[@]}")
new_log logs/rl_train_
note_run
{
  embedded_data --regions
  run_command doctor "${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@"
  run_module "${command[@]}"
  # the model before and after, on test images
  evaluate_run ${EVAL_IMAGES:+--images "$EVAL_IMAGES"}
} 2>&1 | tee -i "$LOG"
echo "log: $LOG"
