#!/usr/bin/env bash
# Experiment 2: a policy that edits masks by operations.   bash run_experiment2.sh quick|full [flags of sa2va-rl operations]
# Environment: MODEL_PATH DATA_ROOT REWARD_NET OUTPUT_DIR GPU SEGMENT_BATCH SEED
#   -> $OUTPUT_DIR/sa2va_post_process_<time>/ with final_model/, logs/ (TensorBoard) and evaluation/report.html
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
prepare operations "$@"
shift
flags=("${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} \
    ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command operations "$MODE" "${flags[@]}"
new_log logs/experiment2_
note_run
{
  embedded_data
  run_command doctor --dataset_name annotations "${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@"
  run_command operations "$MODE" "${flags[@]}"
  evaluate_run
} 2>&1 | tee -i "$LOG"
echo "log: $LOG"
