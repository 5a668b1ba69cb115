#!/usr/bin/env bash
# Owns the tarball: what the .deb has, below one directory, for hosts without dpkg.
# usage: tarball.sh AGENT DIRECTORY (target/papers filled before)
set -euo pipefail
cd "$(dirname "$0")/.."

agent=$1 directory=$2
version=$("$agent" --version | cut -d' ' -f2)
name=cotenant-$version-$(uname -m)-linux
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
root=$place/$name

put() { # MODE DESTINATION FILE...
    local mode=$1 to=$root/$2
    shift 2
    mkdir -p "$to"
    install -m "$mode" "$@" "$to"
}
put 755 bin "$agent"
strip --strip-debug "$root/bin/cotenant"
put 640 etc/cotenant deploy/cotenant.toml
put 644 lib/systemd/system deploy/systemd/cotenant.service
install -D -m 644 deploy/systemd/cotenant.sysusers.conf "$root/lib/sysusers.d/cotenant.conf"
put 644 share/man/man1 target/papers/man/*.1
put 644 share/completions target/papers/completions/*
put 644 share/dashboards dashboards/grafana/*.json
put 644 share/rules dashboards/rules/cotenant.rules.yml
put 644 share/runbooks dashboards/runbooks/*.md
put 644 share/prometheus deploy/prometheus/*.yml
put 644 share/alertmanager deploy/alertmanager/*.yml
put 644 share/otlp deploy/otlp/*
put 644 share/seccomp deploy/seccomp/cotenant.json
put 644 share/doc LICENSE deploy/*.md dashboards/METRICS.md
mkdir -p "$directory"
tar --create --gzip --directory "$place" --owner 0 --group 0 --sort name --mtime "@${SOURCE_DATE_EPOCH:-0}" \
    --file "$directory/$name.tar.gz" "$name"
