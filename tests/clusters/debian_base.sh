#!/usr/bin/env bash
# Makes the Dockerfile's base out of Debian's packages, where no registry can be reached: bookworm
# with its own Python 3.11, committed by buildah under the name that FROM asks for. As root.
#
#   tests/clusters/debian_base.sh NAME
set -euo pipefail
name=$1
# The mirror that this machine's apt uses.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 -E '/debian/?$')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm "$work/root" "$mirror" >"$work/log" ||
  { tail -n 20 "$work/log" >&2; exit 1; }
# Where the official image has it. debootstrap's packages and lists are not in that either.
ln -s /usr/bin/python3.11 "$work/root/usr/local/bin/python"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$work/root" / >/dev/null
buildah config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python "$container"
buildah commit --quiet --rm "$container" "$name"
