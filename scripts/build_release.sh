#!/usr/bin/env bash
# Builds the wheel and the source archive of the last commit, with their SHA-256 sums. No network is used.
#
#   bash scripts/build_release.sh FOLDER
#
# The same commit gives the same bytes with the same versions of Python, setuptools, tar and gzip. What differs
# otherwise: files that are not in the commit, the modes of files (umask), and in the source archive the times and the
# name of the user, which setuptools takes from the machine even if SOURCE_DATE_EPOCH is set. So it is packed again.
# Needs git, GNU tar, gzip, and a Python with pip and setuptools.
set -euo pipefail
[[ $# -eq 1 && "$1" != -* ]] || { sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0" >&2; exit 2; }

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$1"
target="$(cd "$1" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/sdist"
umask 022
SOURCE_DATE_EPOCH="$(git -C "$root" log -1 --format=%ct)"
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC

git -C "$root" -c tar.umask=022 archive HEAD | tar -x -C "$work/source"
cd "$work/source"
python -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' "$work/sdist" > /dev/null
python -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$target" .

archive="$(cd "$work/sdist" && echo *.tar.gz)"
tar -xzf "$work/sdist/$archive" -C "$work/sdist"
tar --sort=name --format=ustar --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
  -C "$work/sdist" -c "${archive%.tar.gz}" | gzip -9n > "$target/$archive"

cd "$target"
sha256sum "${archive%.tar.gz}"{-*.whl,.tar.gz} | tee SHA256SUMS
