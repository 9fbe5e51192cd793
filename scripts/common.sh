# Shared by the shell files at the root; sourced with $root set to that folder. Nothing changes the working folder, so
# every path a user types, as a variable or as a flag, is relative to the user's own folder.
export PYTHONUNBUFFERED=1  # messages appear at once, on the screen and in the log

# The beginning of a shell file: help, the mode, the packages, and the flags that the environment variables stand for.
prepare() {  # $1: command of sa2va-rl, $2: logs/NAME_; then all that the user typed
  local command="$1" name="$2"  # -> MODE, INPUT_FLAGS, LOG
  shift 2
  ! help_asked "$@" || show_help "$command" "$@"
  MODE="${1:-}"
  check_mode "$MODE" "$(basename "$0")"
  shift
  [[ "$command" == reward || "$command" == compare ]] || check_flags "$@"
  ensure_environment ""
  input_flags angiograms "$@"
  new_log "$name"
}

new_log() {  # $1: logs/NAME_ -> LOG, with the time
  mkdir -p "$root/logs"
  LOG="$root/$1$(date +%Y%m%d_%H%M%S)_$$.log"  # two runs may begin in one second
}

# Makes .venv and installs into it unless a virtual environment is active; does nothing when nothing changed. Status 1
# when packages cannot be installed, also where the caller has no set -e.
ensure_environment() {  # $1: extras, e.g. "[test]" or ""
  if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    if [[ ! -f "$root/.venv/bin/activate" || ! -x "$root/.venv/bin/pip" ]]; then
      python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed" >&2; exit 2; }
      python3 -m venv --clear "$root/.venv" || return 1
    fi
    source "$root/.venv/bin/activate"
  fi
  local wanted stamp="$VIRTUAL_ENV/.rl_reward_network_installed"
  wanted="$(cat "$root/requirements.txt" "$root/pyproject.toml" | cksum) $root"
  if ! grep -qsxF "$wanted $1" "$stamp"; then
    echo "installing packages into $VIRTUAL_ENV (once; later runs skip this)"
    python -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt" || return 1
    python -m pip install --quiet --disable-pip-version-check --editable "$root$1" || return 1
    printf '%s\n' "$wanted " "$wanted $1" > "$stamp"  # with extras installed, those without need them no more
  fi
}

help_asked() {  # $@: all that the user typed
  local word
  for word in "$@"; do [[ "$word" == --help || "$word" == -h || "$word" == --help-all ]] && return; done
  return 1
}

# The shell file's own lines, then the flags of its command; nothing else is done, so nothing is installed either.
show_help() {  # $1: command of sa2va-rl; then all that the user typed
  local environment="${VIRTUAL_ENV:-$root/.venv}" level=--help
  [[ " $* " != *" --help-all "* ]] || level=--help-all
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"
  if [[ -f "$environment/.rl_reward_network_installed" ]]; then
    PATH="$environment/bin:$PATH" run_command "$1" "$level"
  else
    echo "The flags are explained here as soon as the first run has installed the packages."
  fi
  exit
}

check_mode() {  # $1: mode, $2: name of the script
  if [[ "$1" != quick && "$1" != full ]]; then
    echo "usage: bash $2 quick|full [flags]     quick: minutes, full: the real run" >&2
    exit 2
  fi
}

check_flags() {  # $@: the user's flags; where the next command reads the run, it is below OUTPUT_DIR
  if [[ " $* " == *" --run"[_-]"folder"* || " $* " == *" --output"[_-]"dir"* ]]; then
    echo "name the folder for the runs by OUTPUT_DIR, not by --run_folder or --output_dir" >&2
    exit 2
  fi
}

# Environment variables as flags; unset variables give none, so the commands keep their defaults. Where neither data nor
# a model are named, the data are the embedded ones of that name, below $EMBEDDED_DATA.
input_flags() {  # $1: angiograms or regions_lamplight; then the user's flags
  INPUT_FLAGS=(--output_dir "${OUTPUT_DIR:-$root/outputs}")
  EMBEDDED_DATA=""
  if ! names_data "$@" && ! names_a_model "$@"; then
    EMBEDDED_DATA="$root/data"
    INPUT_FLAGS+=(--data_root "$EMBEDDED_DATA/$1")
  fi
  [[ -z "${MODEL_PATH:-}" ]] || INPUT_FLAGS+=(--model_path "$MODEL_PATH")
  [[ -z "${DATA_ROOT:-}" ]] || INPUT_FLAGS+=(--data_root "$DATA_ROOT")
  [[ -z "${UNLABELLED_ROOT:-}" ]] || INPUT_FLAGS+=(--unlabelled_root "$UNLABELLED_ROOT")
  [[ -z "${GPU:-}" ]] || INPUT_FLAGS+=(--gpu "$GPU")
  [[ -z "${SEED:-}" ]] || INPUT_FLAGS+=(--seed "$SEED")
}

names_data() {  # $@: the user's flags; --dataset_name may be a folder or a hub id
  [[ -n "${DATA_ROOT:-}" || " $* " =~ " --data"[_-](root|dir)[\ =] ]] && return
  [[ " $* " =~ " --dataset"[_-]"name"[\ =]([^ ]+) && ! "${BASH_REMATCH[1]}" =~ ^(auto|gar|dam|annotations)$ ]]
}

names_a_model() {  # $@: the user's flags; the embedded model is none
  local model="${MODEL_PATH:-}"
  [[ ! " $* " =~ " --model"[_-]"path"[\ =]([^ ]+) ]] || model="${BASH_REMATCH[1]}"
  [[ -n "$model" && "$model" != sa2va-nano ]]
}

# Renders the embedded data if no data were named and they are missing.
embedded_data() {  # $@: flags of sa2va-rl data
  [[ -z "$EMBEDDED_DATA" ]] || run_command data --folder "$EMBEDDED_DATA" "$@"
}

# Ends with an error of the flags or the GPU, before anything is read, rendered or loaded.
check_command() {  # $@: command and flags
  SA2VA_RL_ONLY_CHECK=1 run_command "$@"
}

# A command of sa2va-rl.
run_command() {  # $@: command and flags
  run_module rl_reward_network.cli "$@"
}

# python -m, without the working folder on the path (a user's own files must not be taken for ours), for torchrun's
# processes too; hints at --help name what the user typed.
run_module() {
  PYTHONSAFEPATH=1 SA2VA_RL_CALLED_AS="${SA2VA_RL_CALLED_AS:-bash $0}" python -m "$@"
}
