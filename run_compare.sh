#!/usr/bin/env bash
# Every road on one test split, the best and the cheapest.     bash run_compare.sh quick|full [flags of sa2va-rl compare]
# Environment: MODEL_PATH DATA_ROOT REWARD_NET OUTPUT_DIR GPU SEED SEGMENT_BATCH
#   -> $OUTPUT_DIR/compare_<time>/ with report.html, table.csv, table.tex, best/ and cheapest/
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
! help_asked "$@" || show_help compare "$@"
mode="${1:-}"
check_mode "$mode" run_compare.sh
shift
check_flags "$@"
ensure_environment ""
input_flags angiograms "$@"
flags=("${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command compare "$mode" "${flags[@]}"
mkdir -p "$root/logs"
log="$root/logs/compare_$(date +%Y%m%d_%H%M%S)_$$.log"  # two runs may begin in one second
{
  embedded_data
  run_command doctor --dataset_name annotations "${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@"
  run_command compare "$mode" "${flags[@]}"
} 2>&1 | tee -i "$log"
echo "log: $log"
