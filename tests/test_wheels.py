"""The wheels work without the repository: built, installed elsewhere and asked about a picture."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
TIMEOUT_S = 60


def import_name(distribution: str) -> str:
    """The package that ``distribution`` holds."""
    return "kestrel" if distribution == "kestrel-core" else distribution.replace("-", "_")


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """What ``command`` printed; its output and errors are in the failure when it does not exit with 0."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One freshly built wheel for each distribution."""
    built = {}
    for name in DISTRIBUTIONS:
        folder = tmp_path_factory.mktemp(name)
        run(
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            folder,
            cwd=ROOT / "packages" / name,
        )
        (built[name],) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheels and their dependencies, and not the repository.

    A path file lends it the dependencies of this environment. Path files inside a lent folder are not followed,
    so this environment's own editable installs of the packages stay out of sight.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-index", "--no-deps", "--no-compile", *wheels.values(), cwd=folder)
    borrowed = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return python


def environment() -> dict[str, str]:
    """This process's environment without what could lead an interpreter back to the repository."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "KESTREL", "VIRTUAL"))
    }
    return kept | {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_wheel_holds_its_package_its_licence_and_its_types(wheels: dict[str, Path], name: str):
    files = set(zipfile.ZipFile(wheels[name]).namelist())
    package = import_name(name)
    licences = [file for file in files if file.endswith(".dist-info/licenses/LICENSE")]
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= files
    assert len(licences) == 1
    assert wheels[name].name.endswith("-py3-none-any.whl")
    assert {file.split("/")[0] for file in files} == {package, licences[0].split("/")[0]}


def test_installed_wheels_are_imported_from_their_own_environment(elsewhere: Path, tmp_path: Path):
    names = [import_name(distribution) for distribution in DISTRIBUTIONS]
    code = f"import torch, {', '.join(names)}; print(*(m.__path__[0] for m in ({', '.join(names)})))"
    folders = run(elsewhere, "-c", code, cwd=tmp_path, env=environment()).split()
    assert len(folders) == len(names)
    for folder in folders:
        assert elsewhere.parent.parent in Path(folder).parents


def test_installed_families_list_their_models_without_torch(elsewhere: Path, tmp_path: Path):
    code = (
        "import sys; from kestrel.plugins import PluginHost; host = PluginHost.load(); "
        "print(*(entry.name for entry in host.catalog()), host.failures(), 'torch' in sys.modules, sep='\\n')"
    )
    *names, failures, has_torch = run(elsewhere, "-c", code, cwd=tmp_path, env=environment()).splitlines()
    assert {"kestrel/nano", "Qwen/Qwen3.5-0.8B", "openai/whisper-small"} <= set(names)
    assert (failures, has_torch) == ("", "False")


def test_installed_kernels_say_why_they_step_aside_without_cuda(elsewhere: Path, tmp_path: Path):
    command = (elsewhere.parent / "kestrel", "doctor", "--json")
    shown = json.loads(run(*command, cwd=tmp_path, env=environment()))
    assert shown["plugins"]["kernels-cuda"] == "ok"
    assert shown["backends"]["cuda"]["cpu"] == "unavailable: runs on CUDA devices, not on cpu"


def test_installed_command_answers_a_question_with_the_embedded_model(elsewhere: Path, tmp_path: Path):
    picture = tmp_path / "circles.png"
    canvas = Image.new("RGB", (196, 196), "white")
    for left, top in ((20, 20), (110, 30), (60, 110)):
        ImageDraw.Draw(canvas).ellipse((left, top, left + 60, top + 60), fill="red")
    canvas.save(picture)

    command = (elsewhere.parent / "kestrel", "query", picture, "How many circles are there?", "--json")
    answer = json.loads(run(*command, cwd=tmp_path, env=environment()))["answer"]
    assert answer.strip() == "3"
