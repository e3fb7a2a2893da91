"""Listing plugins is instant and imports nothing heavy."""

import subprocess
import sys
import time

from kestrel.config import Environment
from kestrel.plugins import PluginHost

HEAVY = ("torch", "numpy", "PIL", "huggingface_hub", "tokenizers", "safetensors")


def test_host_imports_nothing_heavy():
    code = (
        "import sys; from kestrel.config import Environment; from kestrel.plugins import PluginHost;"
        "PluginHost.load(Environment(plugins=()));"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_host_lists_ten_plugins_in_under_50_ms(install, good):
    names = [f"many-{i}" for i in range(10)]
    for name in names:
        install(name, good(name))

    def once() -> float:
        start = time.perf_counter()
        host = PluginHost.load(Environment(plugins=tuple(names)))
        assert len(host.families) == 10
        return time.perf_counter() - start

    assert (
        min(once() for _ in range(5)) < 0.05
    )  # seconds; the best of five, since other work shares the machine
