#!/usr/bin/env bash
# Step 1: train the reward network.          bash run_experiment3.sh quick|full [flags of sa2va-rl reward]
# Environment: MODEL_PATH DATA_ROOT OUTPUT_DIR GPU SEED SEGMENT_BATCH        -> $OUTPUT_DIR/reward_net_<time>/
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
! help_asked "$@" || show_help reward "$@"
mode="${1:-}"
check_mode "$mode" run_experiment3.sh
shift
ensure_environment ""
input_flags angiograms "$@"
flags=("${INPUT_FLAGS[@]}" ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command reward "$mode" "${flags[@]}"
mkdir -p "$root/logs"
log="$root/logs/experiment3_$(date +%Y%m%d_%H%M%S)_$$.log"  # two runs may begin in one second
{
  embedded_data
  run_command doctor --dataset_name annotations "${INPUT_FLAGS[@]}" "$@"
  run_command reward "$mode" "${flags[@]}"
} 2>&1 | tee -i "$log"
echo "log: $log"
