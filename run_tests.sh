#!/usr/bin/env bash
# What CI runs: style, types, tests, and the site with its notebooks (tests/docs). On the CPU, offline but for the
# packages; about 11 minutes on two cores, packages installed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$root"
source "$root/scripts/common.sh"
ensure_environment "[test,docs]"
python -m ruff check .  # -m: of a project that was moved, the commands name the old folder
python -m ruff format --check .
python -m mypy
# Two processes of one thread each: two of two threads wait for each other most of the time. A file stays in one, for its
# tests share fixtures.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
