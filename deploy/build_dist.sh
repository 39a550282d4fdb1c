#!/usr/bin/env bash
# Builds the sdist, and the wheel out of it, of the files that git tracks, as they are now.
#
#   deploy/build_dist.sh PYTHON FOLDER [OPTION...]      options are those of `python -m build`
#
# Two wheels of one commit are equal to the byte, whenever, wherever and with whichever umask they
# are built: their times are the commit's, and git's archive has one mode for all plain files.
set -euo pipefail
python=$1 folder=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.."
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
umask 022
changed=$(git stash create)  # a commit of the changes that are not committed, if any
git -c tar.umask=022 archive "${changed:-HEAD}" | tar -xp -C "$tree"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$python" -m build --outdir "$folder" "$@" "$tree"
