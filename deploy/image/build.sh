#!/usr/bin/env bash
# Owns the image's build: contexts for each architecture, one manifest, an OCI archive. No daemon, no registry.
# usage: build.sh AGENT DIRECTORY [ARCHITECTURE=AGENT...]: AGENT is this machine's; others are built elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."

agent=$1 directory=$2
shift 2
own=$(dpkg --print-architecture)
version=$("$agent" --version | cut -d' ' -f2)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
mkdir -p "$directory"
directory=$(realpath "$directory")
context=$directory/context
# vfs and chroot need neither overlayfs nor a user namespace.
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
storage=$(mktemp -d)
trap 'rm -rf "$storage"' EXIT
build=(buildah --root "$storage/root" --runroot "$storage/run")
manifest=cotenant:$version

for pair in "$own=$agent" "$@"; do
    architecture=${pair%%=*} program=${pair#*=}
    root=$context/root-$architecture
    # The packages change seldom; COTENANT_FRESH_ROOT=1 takes them anew.
    if [ ! -d "$root" ] || [ "${COTENANT_FRESH_ROOT:-0}" = 1 ]; then
        deploy/image/root.sh "$architecture" "$root"
    fi
    install -m 755 "$program" "$context/agent-$architecture"
    if [ "$architecture" = "$own" ]; then strip --strip-debug "$context/agent-$architecture"; fi
    python3 deploy/image/sbom.py "$architecture" "$root" "$context/sbom-$architecture.cdx.json"
    cp "$context/sbom-$architecture.cdx.json" "$directory/"
    "${build[@]}" bud --quiet --timestamp "${SOURCE_DATE_EPOCH:-0}" --platform "linux/$architecture" --manifest "$manifest" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" -f deploy/image/Containerfile "$context"
done
rm -f "$directory/cotenant.oci.tar"
"${build[@]}" manifest push --quiet --all "$manifest" "oci-archive:$directory/cotenant.oci.tar:$version"
echo "image: $(stat -c %s "$directory/cotenant.oci.tar") bytes in $directory/cotenant.oci.tar"
