#!/usr/bin/env bash
# Every method on one test split, the best and the cheapest.     bash run_compare.sh quick|full [flags of sa2va-rl compare]
# Environment: MODEL_PATH DATA_ROOT REWARD_NET OUTPUT_DIR GPU SEED SEGMENT_BATCH
#   -> $OUTPUT_DIR/compare_<time>/ with report.html, table.csv, table.tex, best/ and cheapest/
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
prepare compare "$@"
shift
flags=("${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} \
    ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command compare "$MODE" "${flags[@]}"
new_log logs/compare_
{
  embedded_data
  run_command doctor --dataset_name annotations "${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@"
  run_command compare "$MODE" "${flags[@]}"
} 2>&1 | tee -i "$LOG"
echo "log: $LOG"
