# Shared by the shell files at the root; sourced with $root set to that folder. Nothing changes the working folder, so
# every path a user types, as a variable or as a flag, is relative to the user's own folder.
export PYTHONUNBUFFERED=1  # messages appear at once, on the screen and in the log
[[ ! -t 1 ]] || export SA2VA_RL_TERMINAL="${SA2VA_RL_TERMINAL:-$(tty <&1)}"  # for progress bars, which are in no log

# What the user typed, with the variables that were set, for a line that says how an interrupted run goes on.
if [[ -z "${SA2VA_RL_TYPED:-}" ]]; then
  export SA2VA_RL_TYPED=""
  for variable in MODEL_PATH DATA_ROOT UNLABELLED_ROOT REWARD_NET OUTPUT_DIR GPU SEED N_ENVS SEGMENT_BATCH EVAL_IMAGES \
    NPROC SA2VA_RL_REWARDS; do
    [[ -z "${!variable:-}" ]] || SA2VA_RL_TYPED+="$variable=$(printf %q "${!variable}") "
  done
  SA2VA_RL_TYPED+="$(printf '%q ' bash "$0" "$@")"
  SA2VA_RL_TYPED="${SA2VA_RL_TYPED% }"
fi

# The beginning of a shell file: help, the mode, the packages, and the flags that the environment variables stand for.
prepare() {  # $1: command of sa2va-rl; then all that the user typed
  local command="$1"  # -> MODE, INPUT_FLAGS
  shift
  ! help_asked "$@" || show_help "$command" "$@"
  MODE="${1:-}"
  check_mode "$MODE" "$(basename "$0")"
  shift
  [[ "$command" == reward || "$command" == compare ]] || check_flags "$@"
  check_gpu
  [[ "$command" != compare ]] || show_one_gpu
  ensure_environment ""
  input_flags angiograms "$@"
}

# After `check_command`: flags that are refused leave nothing behind.
new_log() {  # $1: logs/NAME_ -> LOG, with the time, beside the runs where OUTPUT_DIR names them
  LOG="${OUTPUT_DIR:-$root}/$1$(date +%Y%m%d_%H%M%S)_$$.log"  # two runs may begin in one second
  mkdir -p "$(dirname "$LOG")" || { echo "set OUTPUT_DIR to a folder of yours" >&2; exit 2; }
}

# The packages, in an environment of their own, never in the Python of the system: the active virtual environment or the
# active conda environment (unless it is conda's base) where it has all packages, else .venv, which is made here. Into an
# active one nothing is installed unless SA2VA_RL_INSTALL_INTO_ACTIVE asks for it. Returns a status, also where the caller
# has no set -e: 1 when packages cannot be installed, 2 without a Python that is new enough.
ensure_environment() {  # $1: extras, e.g. "[test]" or "" -> VIRTUAL_ENV and PATH
  find_environment "$1"
  [[ "$VIRTUAL_ENV" != "$root/.venv" ]] || make_own_environment || return
  export PATH="$VIRTUAL_ENV/bin:$PATH"
  [[ "$VIRTUAL_ENV" != "$root/.venv" && -z "${SA2VA_RL_INSTALL_INTO_ACTIVE:-}" ]] || install_packages "$1"
}

find_environment() {  # $1: extras -> VIRTUAL_ENV; .venv may not be there yet
  unset PYTHONHOME  # names the library of another Python, so `activate` unsets it, too
  local folder status version why
  for folder in "${VIRTUAL_ENV:-}" "$(conda_environment)"; do
    [[ "$folder" != "$root/.venv" ]] || break
    [[ -n "$folder" ]] || continue
    status=0
    version="$(python_version "$folder")" || status=$?
    if ((status == 3)); then
      why="has Python $version, and 3.11 or newer is needed, so it is not used"
    elif ((status != 0)); then
      why="has no Python of its own (deleted or moved?), so it is not used"
    else
      why="$(lacking_packages "$folder" "$1")"
      if [[ -z "$why" || -n "${SA2VA_RL_INSTALL_INTO_ACTIVE:-}" ]]; then
        export VIRTUAL_ENV="$folder"
        return
      fi
      why="lacks packages (first: ${why%%$'\n'*}), so $root/.venv is used; SA2VA_RL_INSTALL_INTO_ACTIVE=1 would install them"
    fi
    echo "note: the active environment $folder $why" >&2
  done
  export VIRTUAL_ENV="$root/.venv"
}

lacking_packages() { "$1/bin/python" -I "$root/scripts/environment.py" "$2" 2>&1 || true; }  # $1: folder, $2: extras

conda_environment() {  # the folder of the active one; nothing for the base, which others share
  [[ -z "${CONDA_PREFIX:-}" || "${CONDA_DEFAULT_ENV:-}" == base || -d "$CONDA_PREFIX/condabin" ]] || echo "$CONDA_PREFIX"
}

# The version of an environment's Python. Status 3 if it is too old, another if it does not start, or would install
# elsewhere, e.g. into the system where pyvenv.cfg is gone.
python_version() {  # $1: folder
  "$1/bin/python" -I -c 'import os, sys
print("%d.%d" % sys.version_info[:2])
sys.exit(3 if sys.version_info < (3, 11) else not os.path.samefile(sys.prefix, sys.argv[1]))' "$1" 2> /dev/null
}

has_pip() { "$VIRTUAL_ENV/bin/python" -I -c 'import pip' 2> /dev/null; }

make_own_environment() {  # .venv, anew unless it is whole
  local python
  if python_version "$VIRTUAL_ENV" > /dev/null && has_pip; then
    # of a project that was moved, `activate` names the old folder
    [[ ! -w "$root" ]] || grep -qsF "$VIRTUAL_ENV" "$VIRTUAL_ENV/bin/activate" ||
      "$VIRTUAL_ENV/bin/python" -m venv --without-pip "$VIRTUAL_ENV"
    return
  fi
  [[ -w "$root" ]] || { echo "$root is read-only, so no .venv can be made there: activate a virtual environment" >&2; return 2; }
  for python in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      "$python" -m venv --clear "$VIRTUAL_ENV"
      return
    fi
  done
  echo "Python 3.11 or newer is needed" >&2
  return 2
}

# Does nothing when nothing changed; asks no network when all is there. PIP_USER=0: where pip may not write into a conda
# environment, it would turn to ~/.local, which every Python of that version sees. The command sa2va-rl is a link into this
# folder, so it is left out where that is read-only; the shell files need none.
install_packages() {  # $1: extras
  local wanted stamp="$VIRTUAL_ENV/.rl_reward_network_installed" pip=(env PIP_USER=0 "$VIRTUAL_ENV/bin/python" -m pip)
  wanted="$(cat "$root/requirements.txt" "$root/pyproject.toml" | cksum) $(python_version "$VIRTUAL_ENV") $root"
  ! grep -qsxF "$wanted $1" "$stamp" || return 0
  echo "installing what is missing into $VIRTUAL_ENV (once; later runs skip this)"
  has_pip || "$VIRTUAL_ENV/bin/python" -m ensurepip > /dev/null || return 1  # uv and pixi install none
  pip+=(install --quiet --disable-pip-version-check)
  if ! "${pip[@]}" -r "$root/requirements.txt"; then
    echo "packages are missing in $VIRTUAL_ENV; without a network, activate an environment that has them" >&2
    return 1
  fi
  # setuptools is there: torch needs it
  [[ ! -w "$root" ]] || "${pip[@]}" --no-build-isolation --editable "$root$1" || return 1
  [[ ! -w "$VIRTUAL_ENV" ]] || printf '%s\n' "$wanted " "$wanted $1" > "$stamp"  # those without extras need them no more
}

# The next command writes the folder of its run into a file, from which `evaluate_run` reads it.
note_run() {  # -> SA2VA_RL_RUN_FILE
  export SA2VA_RL_RUN_FILE
  SA2VA_RL_RUN_FILE="$(mktemp)"
  trap 'rm -f "$SA2VA_RL_RUN_FILE"' EXIT
}

evaluate_run() {  # $@: flags of sa2va-rl evaluate
  [[ -s "$SA2VA_RL_RUN_FILE" ]] || return 0  # nothing can be evaluated, as the command has said
  run_command evaluate --model_path "$(< "$SA2VA_RL_RUN_FILE")" --split test "$@"
}

help_asked() {  # $@: all that the user typed
  local word
  for word in "$@"; do [[ "$word" == --help || "$word" == -h || "$word" == --help-all ]] && return; done
  return 1
}

# The shell file's own lines, then the flags of its command; nothing else is done, so nothing is installed either.
show_help() {  # $1: command of sa2va-rl; then all that the user typed
  local level=--help mode=""
  [[ " $* " != *" --help-all "* ]] || level=--help-all
  [[ "$2" != quick && "$2" != full ]] || mode="$2"
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"
  find_environment ""
  if [[ -z "$(lacking_packages "$VIRTUAL_ENV" "")" ]]; then
    run_command "$1" ${mode:+"$mode"} "$level"
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

# The words for a GPU as --gpu takes them: an index among the visible GPUs, -1 for the CPU.
check_gpu() {  # -> GPU, and CUDA_VISIBLE_DEVICES for a UUID
  case "${GPU:-}" in
    "" | -1) ;;
    cpu) GPU=-1 ;;
    cuda) GPU=0 ;;
    GPU-*,* | MIG-*,*) refuse_gpu ;;
    GPU-* | MIG-*) export CUDA_VISIBLE_DEVICES="$GPU" GPU=0 ;;
    *)
      [[ "$GPU" =~ ^(cuda:)?0*([0-9]+)$ ]] || refuse_gpu
      GPU="${BASH_REMATCH[2]}"
      ;;
  esac
}

refuse_gpu() {
  echo "GPU is '$GPU', expected one GPU: its index from 0 on, cuda:INDEX, a UUID (GPU-..., MIG-...), or -1 or cpu;" \
    "GRPO takes several by CUDA_VISIBLE_DEVICES and NPROC" >&2
  exit 2
}

# Makes GPU the only visible one: transformers' Trainer takes the first. Under SLURM some are hidden already, and the
# index counts those that are not.
show_one_gpu() {  # -> CUDA_VISIBLE_DEVICES, GPU
  local visible=()
  [[ "${GPU:-0}" -gt 0 ]] || return 0
  if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    IFS=', ' read -ra visible <<< "$CUDA_VISIBLE_DEVICES"
    if [[ "$GPU" -ge "${#visible[@]}" ]]; then
      echo "GPU=$GPU, but CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' shows ${#visible[@]} GPUs, counted from 0" >&2
      exit 2
    fi
  fi
  export CUDA_VISIBLE_DEVICES="${visible[GPU]:-$GPU}" GPU=0
}

# Environment variables as flags; unset variables give none, so the commands keep their defaults. Where neither data nor
# a model are named, the data are the embedded ones of that name, below $EMBEDDED_DATA. A file of --config names both.
input_flags() {  # $1: angiograms or regions_lamplight; then the user's flags
  INPUT_FLAGS=(--output_dir "${OUTPUT_DIR:-$root/outputs}")
  EMBEDDED_DATA=""
  if [[ " $* " == *" --config"[\ =]* ]]; then
    [[ -n "${OUTPUT_DIR:-}" ]] || INPUT_FLAGS=()
  elif ! names_data "$@" && ! names_a_model "$@"; then
    EMBEDDED_DATA="$root/data"
    [[ -w "$root" ]] || EMBEDDED_DATA="${OUTPUT_DIR:-$root/outputs}/data"
    INPUT_FLAGS+=(--data_root "$EMBEDDED_DATA/$1")
  fi
  [[ -z "${MODEL_PATH:-}" ]] || INPUT_FLAGS+=(--model_path "$MODEL_PATH")
  [[ -z "${DATA_ROOT:-}" ]] || INPUT_FLAGS+=(--data_root "$DATA_ROOT")
  [[ -z "${UNLABELLED_ROOT:-}" ]] || INPUT_FLAGS+=(--unlabelled_root "$UNLABELLED_ROOT")
  [[ -z "${GPU:-}" ]] || INPUT_FLAGS+=(--gpu "$GPU")
  [[ -z "${SEED:-}" ]] || INPUT_FLAGS+=(--seed "$SEED")
}

names_data() {  # $@: the user's flags; --dataset_name may be a folder or a hub id
  [[ -n "${DATA_ROOT:-}" || " $* " =~ " --data"(set)?[_-](root|dir|path)[\ =] ]] && return
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

# Ends with an error of the flags or the GPU, before anything is read, rendered or loaded; or in any case, where the user
# asked for nothing else.
check_command() {  # $@: command and flags
  SA2VA_RL_ONLY_CHECK=1 run_command "$@"
  [[ -z "${SA2VA_RL_ONLY_CHECK:-}" ]] || exit 0
}

# A command of sa2va-rl.
run_command() {  # $@: command and flags
  run_module rl_reward_network.cli "$@"
}

# python -m, of this folder's package and without the working folder on the path (a user's own files must not be taken
# for ours), for torchrun's processes too; hints at --help name what the user typed.
run_module() {
  PYTHONSAFEPATH=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" SA2VA_RL_CALLED_AS="${SA2VA_RL_CALLED_AS:-bash $0}" \
    "$VIRTUAL_ENV/bin/python" -m "$@"
}
