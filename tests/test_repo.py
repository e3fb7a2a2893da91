"""What holds for the repository as a whole, whatever the packages do."""

import re
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
MAX_LINES = 500

# Split in two so that this file does not find itself.
FORBIDDEN = {
    "a path of the machine it was written on": re.compile(rb"(?<![\w.-])/(?:wo" rb"rk|ro" rb"ot)/"),
    "the host of a package registry": re.compile(
        rb"py" rb"pi\.org|python" rb"hosted\.org|npm" rb"js\.org|deb\.debian" rb"\.org"
    ),
}


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Every file that git tracks and that is on disk."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name.decode() for name in listing.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def test_the_workspace_has_its_packages():
    assert {package.name for package in PACKAGES} >= {"kestrel-core", "kestrel-moondream"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE"])
def test_every_package_ships_its_papers(package: Path, name: str):
    assert (package / name).read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_carries_the_licence_of_the_repository(package: Path):
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_is_marked_as_typed(package: Path):
    assert list(package.glob("src/*/py.typed"))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(tracked: list[Path], what: str):
    pattern = FORBIDDEN[what]
    found = [str(path.relative_to(ROOT)) for path in tracked if pattern.search(path.read_bytes())]
    assert not found, f"{what} stands in {found}"


def test_no_source_file_is_too_long_to_read_in_one_sitting(tracked: list[Path]):
    lengths = {path: len(path.read_bytes().splitlines()) for path in tracked if path.suffix == ".py"}
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"longer than {MAX_LINES} lines: {long}"


def test_tests_cannot_reach_the_network():
    with pytest.raises(RuntimeError, match="loopback only"):
        socket.create_connection(("host.invalid", 80), timeout=1)
    with pytest.raises(RuntimeError, match="loopback only"), socket.socket() as client:
        client.connect(("192.0.2.1", 80))  # RFC 5737: an address for documentation
