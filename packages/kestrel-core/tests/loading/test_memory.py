"""Loading costs the converted weights and little more."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROLLUP = Path("/proc/self/smaps_rollup")

# Peak of anonymous memory (page cache apart), sampled beside the load, in a process of its own.
CODE = """
import sys, threading, time, torch
from pathlib import Path
from torch import nn
from kestrel.loading import SafetensorsReader, load_weights, read_card

def anonymous():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

torch.set_num_threads(1)
card = read_card("toy", sys.argv[1])
with torch.device("meta"):
    model = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(len(card.tensors)))
torch.ones(4).half().float()
before = anonymous()
watcher = threading.Thread(target=watch); watcher.start()
load_weights(model, SafetensorsReader.of(card), device="cpu", dtype=torch.float32)
peak = max(peak, anonymous())
done.set(); watcher.join()
weights = sum(p.nbytes for p in model.parameters())
assert model[0].weight[0, 0] == 1 and weights > 100e6
print((peak - before) / weights)
"""


@pytest.mark.skipif(
    not ROLLUP.exists(), reason="needs Linux's smaps_rollup to tell anonymous memory from page cache"
)
def test_peak_memory_stays_under_1_2_times_the_converted_weights(tmp_path):
    tensor = torch.ones(2048, 1024, dtype=torch.float16)
    save_file({f"{i}.weight": tensor.clone() for i in range(20)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.2
