#!/usr/bin/env bash
# Runs a command beside a real Slurm: slurmctld, and a slurmd in each of N network namespaces.
#
#   tests/clusters/slurm.sh UNPACKED NODES COMMAND [ARGUMENT...]
#
# UNPACKED is where `make install-slurm` has laid Debian's packages. They are put over this machine's
# files in a namespace of their own, where the command runs too, with the links of a cluster:
#
#   the command, slurmctld  login 10.77.0.1 --- bridge --+-- node1 10.77.0.2
#                                                        +-- node2 10.77.0.3
#
# FORGE_SLURM_NODE is what a node has (default: CPUs=4 RealMemory=1000), with Gres=gpu:1 too.
# $FORGE_SLURM_NODES has a file for each node with the id of a process in its namespace. Needs root.
# All processes are in a process namespace that ends with this script.
set -euo pipefail

unpacked=$1 nodes=$2
shift 2
if [[ -z ${FORGE_SLURM_NODES:-} ]]; then
  export FORGE_SLURM_NODES=/run/forge-nodes
  exec unshare --mount --net --uts --pid --mount-proc --fork --kill-child "$0" "$unpacked" "$nodes" "$@"
fi

hostname login
state=$(mktemp -d)
mount -t tmpfs tmpfs "$state"  # gone with the namespace
trap 'umount -l "$state" && rmdir "$state"' EXIT
mkdir "$state"/{up,work,root}
cp -a "$unpacked/." "$state/up/"
mount -t overlay overlay -o "lowerdir=/,upperdir=$state/up,workdir=$state/work" "$state/root"
root=$state/root
for shared in dev sys tmp; do mount --rbind "/$shared" "$root/$shared"; done
mount -t proc proc "$root/proc"
mkdir -p "$root/run" && mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root"/run/{forge-nodes,munge} "$root"/var/{spool/slurmctld,log/munge,lib/munge} \
  "$root"/etc/{slurm,munge}
ln -sf slurmctld-wlm "$root/usr/sbin/slurmctld"
ln -sf slurmd-wlm "$root/usr/sbin/slurmd"
ln -sf slurmstepd-wlm "$root/usr/sbin/slurmstepd"

{
  echo 127.0.0.1 localhost
  echo 10.77.0.1 login
  for ((i = 1; i <= nodes; i++)); do echo "10.77.0.$((i + 1)) node$i"; done
} >"$root/etc/hosts"
(umask 077 && head -c 1024 /dev/urandom >"$root/etc/munge/munge.key")
echo CgroupPlugin=disabled >"$root/etc/slurm/cgroup.conf"
has=${FORGE_SLURM_NODE:-CPUs=4 RealMemory=1000}
if [[ $has == *Gres=gpu:1* ]]; then  # a file that is there on every machine
  echo 'Name=gpu File=/dev/null' >"$root/etc/slurm/gres.conf"
fi
cat >"$root/etc/slurm/slurm.conf" <<END
ClusterName=forge
SlurmctldHost=login(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SelectType=select/cons_tres
GresTypes=gpu
$(for ((i = 1; i <= nodes; i++)); do
  echo "NodeName=node$i NodeAddr=10.77.0.$((i + 1)) $has State=UNKNOWN"
done)
PartitionName=main Nodes=ALL Default=YES State=UP
END

ip link set lo up
ip link add bridge type bridge
ip link set bridge up
ip addr add 10.77.0.1/24 dev bridge
chroot "$root" munged
for ((i = 1; i <= nodes; i++)); do
  unshare --net --uts sleep infinity &
  guard=$!
  own=$(readlink /proc/self/ns/net)
  # Until it has both namespaces of its own, and is what it shall be.
  until [[ $(tr '\0' ' ' <"/proc/$guard/cmdline" 2>/dev/null) == "sleep infinity " &&
    $(readlink "/proc/$guard/ns/net") != "$own" ]]; do sleep 0.05; done
  echo "$guard" >"$root/run/forge-nodes/node$i"
  ip link add "node$i" type veth peer name eth0 netns "$guard"
  ip link set "node$i" master bridge up
  inside="nsenter --target $guard --net --uts"
  $inside hostname "node$i"
  $inside ip link set lo up
  $inside ip addr add "10.77.0.$((i + 1))/24" dev eth0
  $inside ip link set eth0 up
  mkdir -p "$root/var/spool/slurmd-node$i"
  $inside chroot "$root" slurmd -N "node$i"
done
chroot "$root" slurmctld
for _ in $(seq 240); do
  if [[ $(chroot "$root" sinfo -h -o %T 2>/dev/null) == idle ]]; then ready=1; break; fi
  sleep 0.5
done
if [[ -z ${ready:-} ]]; then
  echo "Slurm did not become ready:" >&2
  tail -n 20 "$root"/var/log/slurm*.log >&2
  exit 4
fi
here=$PWD
chroot "$root" env --chdir="$here" "$@"
