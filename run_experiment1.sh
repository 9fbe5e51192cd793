#!/usr/bin/env bash
# Experiment 1: a prompt policy that is rewarded by labels.   bash run_experiment1.sh quick|full [flags]
# Environment: MODEL_PATH DATA_ROOT REWARD_NET OUTPUT_DIR GPU N_ENVS SEGMENT_BATCH SEED; --reward dice by default
#   -> $OUTPUT_DIR/sa2va_rl_finetune_experiment1_<time>/ with final_model/, logs/ (TensorBoard) and evaluation/report.html
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
! help_asked "$@" || show_help prompts "$@"
mode="${1:-}"
check_mode "$mode" run_experiment1.sh
shift
reward=(--reward dice)
[[ " $* " != *" --reward"[\ =]* && " $* " != *" --config"[\ =]* ]] || reward=()  # the file of a run names its own
export SA2VA_RL_CALLED_AS="bash $0"
exec bash "$root/run_step2_finetune.sh" "$mode" "$@" ${reward[@]+"${reward[@]}"}
