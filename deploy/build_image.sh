#!/usr/bin/env bash
# Builds a target of deploy/Dockerfile with docker, podman or buildah, the first that is here or
# $BUILDER. Writes the image's SBOM to sbom-TARGET.json, prints its size and its largest packages.
#
#   deploy/build_image.sh cpu|cuda [OPTION...]      options are those of the builder's `build`
set -euo pipefail
target=$1
shift
cd "$(dirname "$0")/.."
builder=${BUILDER:-$(basename "$(command -v docker || command -v podman || command -v buildah || true)")}
test -n "$builder" || { echo "none of docker, podman and buildah is here: no image is built" >&2; exit 1; }
image=cartridge-forge:$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)-$target

# Of podman and buildah: an image of OCI's format would lose the HEALTHCHECK, and buildah keeps no
# layer for the next build unless it is asked to.
export BUILDAH_FORMAT=docker BUILDAH_LAYERS=true
"$builder" build -f deploy/Dockerfile --target "$target" -t "$image" "$@" .

inside() {  # a command in a container of the image
  if [ "$builder" != buildah ]; then
    "$builder" run --rm --network none --entrypoint "$1" "$image" "${@:2}"
    return
  fi
  local container status=0
  container=$(buildah from "$image")
  buildah run "$container" -- "$@" || status=$?
  buildah rm "$container" >/dev/null
  return $status
}

inside cat /app/sbom.json >"sbom-$target.json"
echo "$image: $("$builder" images --format '{{.Size}}' "$image"), its packages in sbom-$target.json"
echo "its largest folders, in MB:"
inside sh -c 'du -sm /venv/lib/python3.11/site-packages/* | sort -rn | head -n 12'
