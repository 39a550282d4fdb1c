#!/usr/bin/env bash
# safetensors 0.8.0 (numpy 2.4.2): one file, saved by several processes, has several contents.
#
# Guess: the format is plain, so equal tensors with equal metadata give equal bytes, and the hash of a file
# names its content.
# Seen 2026-11-29: with four metadata keys, twelve processes wrote up to twelve different files. The header's
# tensors stand in a fixed order, but "__metadata__" is written in the order of a hash map that each process
# seeds anew. With one key all twelve are equal. So: hash the tensors and the metadata's items, or keep one
# key that holds everything.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q safetensors==0.8.0 numpy==2.4.2
cat > "$work/save.py" <<'PY'
import hashlib, sys
import numpy
from safetensors.numpy import save
tensors = {"keys": numpy.zeros((2, 3), numpy.float32), "values": numpy.ones((2, 3), numpy.float32)}
metadata = {name: "1" for name in ("base", "tokens", "step", "digest")[: int(sys.argv[1])]}
print(hashlib.sha256(save(tensors, metadata=metadata)).hexdigest())
PY
files() { for _ in $(seq 12); do "$work/venv/bin/python" "$work/save.py" "$1"; done | sort -u | wc -l; }
one=$(files 1); four=$(files 4)
echo "different files of twelve: $one with one metadata key, $four with four"
[ "$one" = 1 ] && [ "$four" -gt 1 ]
