#!/usr/bin/env bash
# The recipe on a machine that ssh reaches: copies this checkout, installs, runs, fetches the table.
#
#   HF_TOKEN=... recipes/one_gpu/ssh.sh USER@HOST --data https://... --dollars 20 --price P
#
# The run goes on when the connection breaks, and the same command attaches to it again. It also goes
# on with a run on a machine that took the first one's place, where FOLDER (default: one-gpu, in the
# home) is on a disk that outlived it. The machine needs python3.11 and make. Nobody stops renting it
# but you.
set -euo pipefail
host=${1:?usage: ssh.sh USER@HOST --data FILE --dollars D --price P [OPTION...]}
shift
cd "$(dirname "$0")/../.."

# As words of the shell at the other end.
options=$(printf ' %q' "$@")
at=$(printf '%q' "${FOLDER:-one-gpu}")
token=$(printf '%q' "${HF_TOKEN:-}")

ssh "$host" "mkdir -p $at/code"
tar -cz --exclude=./.git --exclude='./.venv*' --exclude=./runs --exclude=./library \
  --exclude='./.*_cache' --exclude=__pycache__ . | ssh "$host" "tar -xz -C $at/code"
# The token goes by standard input: a command line is seen by every user of the machine. A bill
# begins with a boot of the machine, so its time is kept by that.
code=0
ssh "$host" "bash -s" <<END || code=$?
set -euo pipefail
cd $at
export HF_TOKEN=$token FORGE_HOME="\$PWD/forge"
boot=\$(cat /proc/sys/kernel/random/boot_id)
test -s "since-\$boot" || date +%s > "since-\$boot"
if ! { test -s "pid-\$boot" && kill -0 "\$(cat "pid-\$boot")" 2>/dev/null; }; then
  cat > start.sh <<'START'
cd code && make install-vllm VLLM=vllm==0.32.0 && .venv/bin/python -m recipes.one_gpu.run \\
  --since "\$1" --out ../out$options
echo \$? > ../exit-code
START
  rm -f exit-code
  setsid nohup bash start.sh "\$(cat "since-\$boot")" > log 2>&1 < /dev/null &
  echo \$! > "pid-\$boot"
fi
while kill -0 "\$(cat "pid-\$boot")" 2>/dev/null; do sleep 1; done
tail -n 60 log
test -s exit-code || { echo "the run was killed" >&2; exit 1; }
exit "\$(cat exit-code)"
END
if [[ $code != 0 ]]; then
  echo "ended with $code; the same command goes on, $host:$at/log has the output" >&2
  exit "$code"
fi
mkdir -p runs/one-gpu
for file in table.md table.json; do ssh "$host" "cat $at/out/$file" >"runs/one-gpu/$file"; done
echo "written: runs/one-gpu/table.md, table.json"
