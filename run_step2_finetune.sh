#!/usr/bin/env bash
# The main job: a prompt policy by PPO on a learned reward, and its comparison with all baselines.
#   bash run_step2_finetune.sh quick|full [flags of sa2va-rl prompts]
# Environment: MODEL_PATH DATA_ROOT UNLABELLED_ROOT REWARD_NET OUTPUT_DIR GPU N_ENVS SEGMENT_BATCH SEED
#   -> $OUTPUT_DIR/sa2va_rl_finetune_<time>/ with final_model/, logs/ (TensorBoard) and evaluation/report.html
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$root/scripts/common.sh"
prepare prompts "$@"
shift
flags=("${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} ${N_ENVS:+--n_envs "$N_ENVS"}
  ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"} "$@")
check_command prompts "$MODE" "${flags[@]}"
new_log logs/step2_finetune_
note_run
{
  # 1. the pre-flight table
  embedded_data
  run_command doctor --dataset_name annotations "${INPUT_FLAGS[@]}" ${REWARD_NET:+--reward_net "$REWARD_NET"} "$@"
  # 2. a reward network, if none fits; 3. the prompt policy
  run_command prompts "$MODE" "${flags[@]}"
  # 4. the policy and its baselines on test patients
  evaluate_run ${SEGMENT_BATCH:+--segment_batch "$SEGMENT_BATCH"}
} 2>&1 | tee -i "$LOG"
echo "log: $LOG"
