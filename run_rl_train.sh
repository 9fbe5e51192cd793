#!/usr/bin/env bash
# GRPO: fine-tune Sa2VA's LoRA weights in two loops, and compare with the model as it was.
#   bash run_rl_train.sh quick|full [flags of scripts.train_sa2va_rl]
# Environment: MODEL_PATH DATA_ROOT REWARD_NET OUTPUT_DIR GPU SEED, and EVAL_IMAGES (most test regions; all without it)
#   -> $OUTPUT_DIR/sa2va_grpo_<time>/ with final_model/, logs/ (TensorBoard) and evaluation/report.html
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
mode="${1:-}"
check_mode "$mode" run_rl_train.sh
shift
check_flags "$@"
ensure_environment ""
if [[ "${GPU:-0}" -gt 0 ]]; then  # the Trainer takes the first GPU it sees
  export CUDA_VISIBLE_DEVICES="$GPU" GPU=0
fi
world_flags regions_lamplight "$@"
mkdir -p "$root/logs"
log="$root/logs/rl_train_$(date +%Y%m%d_%H%M%S)_$$.log"  # two runs may begin in one second
said="$(mktemp)"
trap 'rm -f "$said"' EXIT
{
  embedded_data --regions
  run_module scripts.doctor "${WORLD_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@"
  run_module scripts.train_sa2va_rl "$mode" "${WORLD_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@" \
    | tee -i "$said"
  # the model before and after, on images nobody has seen
  run_module scripts.evaluate_rl_finetuned_sa2va --model_path "$(sed -n 's/^fine-tuned model: //p' "$said")" --split test \
    ${EVAL_IMAGES:+--images "$EVAL_IMAGES"}
} 2>&1 | tee -i "$log"
echo "log: $log"
