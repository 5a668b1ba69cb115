"""Owns the kernels: which suite has which, and fetching them by apt beside this machine's own sources.
Refuses to install anything: packages are unpacked below target/kernels and stay there."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / "target" / "kernels"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Debian's archives by the label in their Release file, and the variable that names one where this machine's apt has none.
ARCHIVE = ("Debian", "KERNELS_ARCHIVE")
SECURITY = ("Debian-Security", "KERNELS_SECURITY")


class Gone(Exception):
    """A suite, or what was looked for in it, is not there any more. Its text says which."""


@functools.cache
def address(archive):
    """Where this machine's own apt reads an archive, or what the variable says."""
    label, variable = archive
    if variable in os.environ:
        return os.environ[variable].rstrip("/")
    asked = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Origin: Debian", f"Label: {label}"]
    answer = subprocess.run(asked, text=True, capture_output=True, check=False)
    for line in answer.stdout.splitlines():
        return line.removeprefix(f"{label} ").rstrip("/")
    raise Gone(f"apt reads no archive of Debian's that is labelled {label} here (apt-get update?): set {variable}=URL")


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    archive: tuple = ARCHIVE
    architecture: str = "amd64"

    @property
    def place(self):
        return CACHE / "apt" / f"{self.name}-{self.architecture}"

    def apt(self, *arguments, where=None):
        settings = {
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Dir::Etc::sourcelist": self.place / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": self.place / "lists",
            "Dir::Cache": self.place / "cache",
        }
        options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        return subprocess.run(
            [arguments[0], *options, *arguments[1:]], cwd=where, text=True, capture_output=True, timeout=600
        )

    def update(self):
        source = f"deb [signed-by={KEYRING}] {address(self.archive)} {self.name} main\n"
        (self.place / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (self.place / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        (self.place / "sources.list").write_text(source)
        answer = self.apt("apt-get", "-qq", "update", "--error-on=any")
        if answer.returncode != 0:
            raise Gone(f"{self.name} ({self.architecture}) cannot be read: {last_line(answer.stderr)}")

    def versions(self):
        """Kernels for virtual machines that it has, oldest first: (version, what package names end with)."""
        names = self.apt("apt-cache", "pkgnames", "linux-image-").stdout.split()
        pattern = re.compile(rf"linux-image-((\d+)\.(\d+)\.(\d+)\S*)-cloud-{self.architecture}")
        found = []
        for match in filter(None, map(pattern.fullmatch, names)):
            # 6.1.0-57 and 6.12.117+deb12: the number after the dash counts where the third one stays 0.
            numbers = tuple(int(number) for number in re.findall(r"\d+", match[1]))
            found.append((numbers, match[1]))
        return [name for _, name in sorted(found)]

    def has(self, package):
        return bool(self.apt("apt-cache", "show", package).stdout.strip())

    def unpack(self, package, into):
        """The files of a package, from the cache or the mirror."""
        done = into / f".{package}"
        if done.exists():
            return
        into.mkdir(parents=True, exist_ok=True)
        answer = self.apt("apt-get", "-qq", "download", package, where=into)
        debs = list(into.glob("*.deb"))
        if answer.returncode != 0 or not debs:
            raise Gone(f"{package} of {self.name} cannot be fetched: {last_line(answer.stderr)}")
        for deb in debs:
            subprocess.run(["dpkg-deb", "-x", deb, into], check=True)
            deb.unlink()
        done.touch()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel on disk."""

    version: str
    suite: Suite
    files: pathlib.Path

    @property
    def image(self):
        found = sorted(path for path in self.files.rglob("vmlinuz*") if path.is_file())
        if not found:
            raise Gone(f"the packages of {self.version} hold no vmlinuz")
        return found[0]

    @property
    def headers(self):
        """(of this flavour, common to all flavours); None where the suite has not both."""
        own = f"linux-headers-{self.version}-cloud-{self.suite.architecture}"
        common = f"linux-headers-{self.version}-common"
        try:
            for package in (own, common):
                self.suite.unpack(package, self.files)
        except Gone:
            return None
        return self.files / "usr/src" / own, self.files / "usr/src" / common


def fetch(suite, wanted, newest=True):
    """The newest (or oldest) kernel of `suite` whose version begins so, or satisfies the predicate `wanted`."""
    suite.update()
    matches = wanted if callable(wanted) else lambda version: version.startswith(f"{wanted}.")
    versions = [version for version in suite.versions() if matches(version)]
    if not versions:
        raise Gone(f"{suite.name} has no such kernel for {suite.architecture}")
    version = versions[-1 if newest else 0]
    files = CACHE / "files" / f"{suite.architecture}-{version}"
    # Since 6.19 the image is in a package of its own.
    for kind in ("image", "binary"):
        package = f"linux-{kind}-{version}-cloud-{suite.architecture}"
        if suite.has(package):
            suite.unpack(package, files)
    return Kernel(version, suite, files)


def last_line(text):
    return (text.strip().splitlines() or ["no reason given"])[-1]
