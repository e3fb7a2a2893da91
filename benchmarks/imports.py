"""How fast the front is: ``import kestrel`` over a bare interpreter, ``kestrel --help`` over a bare typer app.

Run: ``python benchmarks/imports.py [--rounds 21] [--json]``. Commands take turns, so that a busy moment hits all of
them; the fastest and the median of the rounds are reported, and the limits are held against the medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORT_LIMIT_MS = 100.0
HELP_LIMIT = 1.5
UNWANTED = ("torch", "numpy", "PIL", "pluggy", "kestrel.plugins")

BARE_TYPER = '''
import typer
app = typer.Typer()
@app.command()
def hello(name: str = "you") -> None:
    """Greet."""
@app.command()
def bye(name: str = "you") -> None:
    """Part."""
app()
'''


def elapsed_ms(command: list[str]) -> float:
    """How long ``command`` takes, from start to exit."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1000.0


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Times of every command, one per round, after a round that warms the caches."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            spent = elapsed_ms(command)
            if number:
                times[name].append(spent)
    return times


def unwanted_after(code: str) -> list[str]:
    """Heavy modules that ``code`` leaves loaded."""
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('\\nMODULES', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    loaded = out[out.rindex("MODULES") :].split()
    return [name for name in UNWANTED if name in loaded]


def main() -> int:
    """0 if both limits hold and nothing heavy is imported, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE_TYPER, encoding="utf-8")
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import kestrel": [sys.executable, "-c", "import kestrel"],
            "bare typer --help": [sys.executable, str(bare), "--help"],
            "kestrel --help": [sys.executable, "-m", "kestrel", "--help"],
        }
        times = measure(commands, args.rounds)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    added_ms = median["import kestrel"] - median["python -c pass"]
    ratio = median["kestrel --help"] / median["bare typer --help"]
    unwanted = sorted(
        {
            *unwanted_after("import kestrel"),
            *unwanted_after("from kestrel.cli.app import build_app; build_app()(['--help'])"),
        }
    )
    passed = added_ms < IMPORT_LIMIT_MS and ratio <= HELP_LIMIT and not unwanted
    if args.json:
        report = {
            "python": platform.python_version(),
            "median_ms": median,
            "min_ms": {name: min(spent) for name, spent in times.items()},
            "import_added_ms": added_ms,
            "help_ratio": ratio,
            "unwanted": unwanted,
            "passed": passed,
        }
        print(json.dumps(report))
        return 0 if passed else 1
    for name, spent in times.items():
        print(f"{name:20s} min {min(spent):7.1f} ms   median {median[name]:7.1f} ms")
    print(f"import kestrel adds {added_ms:.1f} ms (limit {IMPORT_LIMIT_MS:.0f})")
    print(f"kestrel --help is {ratio:.2f} x a bare typer app (limit {HELP_LIMIT})")
    print(f"heavy modules loaded: {', '.join(unwanted) or 'none'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
