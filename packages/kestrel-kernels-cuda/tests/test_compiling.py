"""Every kernel in every configuration compiles for the architectures it is meant for, within their limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel_kernels_cuda.compiling import SHARED_LIMIT


@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_shared_memory_and_without_spills(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "kestrel_kernels_cuda.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, done.stderr
    errors = [f"{f['name']} for sm_{f['arch']}: {f['error']}" for f in found if f["error"]]
    assert not errors, "\n".join(errors)
    big = [f for f in found if f["shared"] > SHARED_LIMIT[f["arch"]]]
    assert not big, big
    spilled = [f for f in found if f["stack"] > f["allowed"] or f["local"]]
    assert not spilled, spilled
    faulty = [f for f in found if f["unset"]]
    assert not faulty, faulty
    assert done.returncode == 0, done.stderr
