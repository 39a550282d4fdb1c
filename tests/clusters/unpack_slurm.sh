#!/usr/bin/env bash
# Lays Slurm 24.11 with all that it needs, out of Debian 13's packages, under DIR. Nothing is installed
# and no service is started. Debian 12's Slurm is too old: SlurmJob reads the JSON of 24.05 and newer.
#
#   tests/clusters/unpack_slurm.sh DIR
set -euo pipefail

command -v apt-get >/dev/null || { echo "no apt-get: tests of a real Slurm are skipped"; exit 0; }
dir=$(realpath -m "$1")
# The mirror that this machine's apt uses.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 -E '/debian/?$') ||
  { echo "apt has no mirror of Debian: tests of a real Slurm are skipped"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,debs,root}
: >"$work/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror trixie main" >"$work/sources.list"
cat >"$work/apt.conf" <<END
Dir::State "$work";
Dir::State::Lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "-";
Debug::NoLocking "1";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
END
export APT_CONFIG=$work/apt.conf
apt-get -qq update
cd "$work/debs"
apt-get install -s slurmctld slurmd slurm-client munge | awk '/^Inst/ {print $2}' | sort -u |
  xargs apt-get -qq download
for package in *.deb; do dpkg-deb -x "$package" "$work/root"; done
rm -rf "$dir" && mkdir -p "$(dirname "$dir")" && mv "$work/root" "$dir"
