#!/usr/bin/env bash
# Step 1: train the reward network.          bash run_experiment3.sh quick|full [flags of sa2va-rl reward]
# Environment: MODEL_PATH DATA_ROOT OUTPUT_DIR GPU SEED SEGMENT_BATCH        -> $OUTPUT_DIR/reward_net_<time>/
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
prepare reward "$@"
shift
flags=("${INPUT_FLAGS[@]}" ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command reward "$MODE" "${flags[@]}"
new_log logs/experiment3_
{
  embedded_data
  run_command doctor --dataset_name annotations "${INPUT_FLAGS[@]}" "$@"
  run_command reward "$MODE" "${flags[@]}"
} 2>&1 | tee -i "$LOG"
echo "log: $LOG"
