#!/usr/bin/env bash
# Owns the image's root: Debian's C library and certificates for one architecture, unpacked and nothing run.
# Refuses a shell, a package manager and whatever the agent is not linked with.
# usage: root.sh ARCHITECTURE (amd64, arm64) ROOT
set -euo pipefail

architecture=$1 root=$2
packages=(libc6 libgcc-s1 ca-certificates)
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT

# apt of its own, so that neither this host's architecture nor its held versions matter; the host's sources and keys.
mkdir -p "$state"/lists/partial "$state"/cache/archives/partial "$state"/debs
touch "$state/status"
apt=(apt-get -qq -o "APT::Architecture=$architecture" -o "APT::Architectures::=$architecture" -o "Dir::State=$state"
    -o "Dir::State::status=$state/status" -o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state/cache"
    -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$state/debs" && "${apt[@]}" download "${packages[@]}")

rm -rf "$root"
mkdir -p "$root"/usr/lib "$root"/usr/lib64 "$root"/usr/bin "$root"/etc/ssl/certs "$root"/etc/cotenant "$root"/tmp "$root"/run/cotenant \
    "$root"/proc "$root"/sys "$root"/dev "$root"/var/log/pods "$root"/var/lib/kubelet/pod-resources "$root"/driver \
    "$root"/var/lib/dpkg/status.d
chmod 1777 "$root/tmp"
# One /usr, as Debian has it.
ln -s usr/lib "$root/lib"
ln -s usr/lib64 "$root/lib64"
for deb in "$state"/debs/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar --extract --keep-directory-symlink --no-same-owner --directory "$root" \
        --exclude './usr/share/doc/*/[!c]*' --exclude './usr/share/doc/*/changelog*' --exclude './usr/share/lintian' \
        --exclude './usr/lib/*/gconv' --exclude './usr/sbin' --exclude './usr/share/man' --exclude './lib/*/libnss_[!fd]*'
    # Where scanners look for what is installed, without a package manager.
    dpkg-deb --field "$deb" > "$root/var/lib/dpkg/status.d/$(dpkg-deb --field "$deb" Package)"
done

cat "$root"/usr/share/ca-certificates/mozilla/*.crt > "$root/etc/ssl/certs/ca-certificates.crt"
rm -r "$root/usr/share/ca-certificates"
printf 'root:x:0:0:root:/:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' > "$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' > "$root/etc/group"
printf 'hosts: files dns\n' > "$root/etc/nsswitch.conf"
printf 'include /etc/ld.so.conf.d/*.conf\n' > "$root/etc/ld.so.conf"
# By this file the NVIDIA runtime knows into which directory its libraries belong.
dpkg-deb --field "$state"/debs/libc6_*.deb Version > "$root/etc/debian_version"
find "$root" -exec touch --no-dereference --date "@${SOURCE_DATE_EPOCH:-0}" {} +
