#!/usr/bin/env bash
# Installs the packages, as the first run of any shell file does, and nothing else.     bash scripts/install.sh
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/common.sh"
ensure_environment ""
echo "packages are in $VIRTUAL_ENV"
