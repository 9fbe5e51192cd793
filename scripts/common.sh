# Shared by the shell files at the root; sourced, not run.
# Makes .venv and installs into it unless a virtual environment is active; does nothing when nothing changed.

# Paths that the user named are meant from where the command was typed, not from the project's folder.
from_caller() {  # $1: folder the command was typed in
  local name value
  for name in MODEL_PATH DATA_ROOT REWARD_NET OUTPUT_DIR; do
    value="${!name:-}"
    if [[ -n "$value" && "$value" != /* && ( -e "$1/$value" || "$name" == OUTPUT_DIR ) ]]; then
      export "$name=$1/$value"
    fi
  done
}

ensure_environment() {  # $1: extras, e.g. "[test]" or ""
  if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    [[ -x .venv/bin/python ]] || python3 -m venv .venv
    source .venv/bin/activate
  fi
  local wanted stamp="$VIRTUAL_ENV/.rl_reward_network_installed"
  wanted="$(cat requirements.txt pyproject.toml | cksum) $PWD"
  if ! grep -qsxF "$wanted $1" "$stamp"; then
    echo "installing packages into $VIRTUAL_ENV (once; later runs skip this)"
    python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    python -m pip install --quiet --disable-pip-version-check --editable ".$1"
    printf '%s\n' "$wanted " "$wanted $1" > "$stamp"  # with extras installed, those without need them no more
  fi
}

check_mode() {  # $1: mode, $2: name of the script
  if [[ "$1" != quick && "$1" != full ]]; then
    echo "usage: bash $2 quick|full [flags]     quick: minutes, full: the real run" >&2
    exit 2
  fi
}

# What the environment says, as flags; unset variables give none, so the commands keep their own defaults.
world_flags() {
  local flags=(--output_dir "${OUTPUT_DIR:-outputs}")
  [[ -n "${MODEL_PATH:-}" ]] && flags+=(--model_path "$MODEL_PATH")
  [[ -n "${DATA_ROOT:-}" ]] && flags+=(--data_root "$DATA_ROOT")
  [[ -n "${GPU:-}" ]] && flags+=(--gpu "$GPU")
  [[ -n "${SEED:-}" ]] && flags+=(--seed "$SEED")
  WORLD_FLAGS=("${flags[@]}")
}
