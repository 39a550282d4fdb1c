#!/usr/bin/env bash
# llguidance 1.7.6: its package cannot be vendored or zipped; `import llguidance` needs the wheel's metadata.
#
# Guess: a copied package folder (an abi3 library and plain modules) imports on any Python 3.9 or newer.
# Seen 2026-11-29: the folder without llguidance-1.7.6.dist-info beside it raises PackageNotFoundError at
# import, because the version is read from the installed metadata; with the metadata copied it imports, and the
# same copy serves Python 3.11 and 3.12. Whoever ships a subset of site-packages must ship *.dist-info too.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-deps --target "$work/full" llguidance==1.7.6
mkdir "$work/bare"; cp -r "$work/full/llguidance" "$work/bare/"
try() { (cd "$work" && PYTHONPATH="$1" python3 -S -c 'import llguidance; print("imports", llguidance.__version__)' 2>&1 | tail -1) || true; }
bare=$(try "$work/bare"); full=$(try "$work/full")
echo "without metadata: $bare"; echo "with metadata: $full"
case "$bare" in *PackageNotFoundError*) ;; *) exit 1 ;; esac
[ "$full" = "imports 1.7.6" ]
