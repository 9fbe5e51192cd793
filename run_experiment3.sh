#!/usr/bin/env bash
# Step 1: train the reward network.          bash run_experiment3.sh quick|full [flags of scripts.train_reward_network]
# Environment: MODEL_PATH DATA_ROOT OUTPUT_DIR GPU SEED SEGMENT_BATCH        -> $OUTPUT_DIR/reward_net_<time>/
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
! help_asked "$@" || show_help scripts.train_reward_network
mode="${1:-}"
check_mode "$mode" run_experiment3.sh
shift
ensure_environment ""
world_flags angiograms "$@"
flags=("${WORLD_FLAGS[@]}" ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command scripts.train_reward_network "$mode" "${flags[@]}"
mkdir -p "$root/logs"
log="$root/logs/experiment3_$(date +%Y%m%d_%H%M%S)_$$.log"  # two runs may begin in one second
{
  embedded_data
  run_module scripts.doctor --dataset_name annotations "${WORLD_FLAGS[@]}" "$@"
  run_module scripts.train_reward_network "$mode" "${flags[@]}"
} 2>&1 | tee -i "$log"
echo "log: $log"
