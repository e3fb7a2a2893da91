"""How long sampling takes: every stage as a captured program, by rows, beside the reference and the time to read.

``python sampling.py [--vocab 248320] [--rows 1,16,64,256] [--out DIRECTORY]`` prints one JSON line per program: ``us``
is the median of one replay, ``floor_us`` what reading the logits once takes at 4.25 TB/s, ``differ`` counts rows for
which kernels and reference chose different ids.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from stopwatch import need_gpu

from kestrel.config import Settings
from kestrel.ops import resolve_ops
from kestrel.sampling import Sampler, SamplingParams
from kestrel.spi import Automaton, Decoding, LogitRule, Static, TokenSet, TokenSpec
from kestrel_kernels_cuda.backend import CudaBackend

COPY_RATE = 4.25e12  # bytes a second, measured on one H200
KINDS = {
    "greedy": {"temperature": 0.0},
    "draw": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 50},
    "top_k top_p min_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "flat top_p": {"temperature": 100.0, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "logprobs": True, "top_logprobs": 20},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    "rules": {"temperature": 0.0, "logit_bias": {3: 1.0}},
    "whisper": {"temperature": 0.0},
}


def decoding(kind: str, vocab: int) -> Decoding:
    """The rules of a kind of row."""
    automaton = Automaton(
        classes=(TokenSet.span(0, vocab // 2),),
        next=((1, 0), (0, 1)),
        mask=(TokenSet.all(), TokenSet.span(3, vocab - 9)),
    )
    stops = frozenset({5, 9})
    if kind == "rules":
        return Decoding(rules=(automaton, Static(allowed=TokenSet.span(0, vocab - 500))), stop_ids=stops)
    if kind == "whisper":
        never = Static(allowed=TokenSet.of(range(100, 7000, 77)).but())
        group = LogitRule(op="prefer_group", params={"group": TokenSet.span(vocab - 1501, vocab)})
        return Decoding(rules=(automaton, never, group), stop_ids=stops)
    return Decoding(stop_ids=stops)


def sampler(kind: str, vocab: int, rows: int, *, by_kernels: bool) -> Sampler:
    """A sampler all of whose rows are of ``kind``."""
    device = torch.device("cuda")
    spec = TokenSpec(vocab_size=vocab, hidden_size=8, max_positions=4096)
    ops = resolve_ops(device=device, backends=[CudaBackend()] if by_kernels else [])
    made = Sampler(spec, rows, device, ops=ops)
    params = SamplingParams.resolve(Settings.from_mapping(KINDS[kind]), decoding(kind, vocab), spec)
    for row in range(rows):
        made.set_row(row, params, seed=row, prompt_ids=range(50))
    made.staging.send()
    return made


def program(made: Sampler, logits: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """One step of all rows, captured, and where its ids are."""
    rows = torch.arange(len(logits), device="cuda")
    needs = made.program_of(made.needs_of(range(len(logits))))
    made.prepare(needs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made.sample_as(logits, needs, rows)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = made.sample_as(logits, needs, rows)
    return graph, sampled.ids


def microseconds(graph: torch.cuda.CUDAGraph, times: int = 40) -> float:
    """The median of one replay."""
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 200)
    return statistics.median(found)


def main() -> int:
    """0 when kernels and reference chose the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    need_gpu()
    lines, differ = [], 0
    for kind in wanted.kinds.split(","):
        for rows in map(int, wanted.rows.split(",")):
            logits = (torch.randn(rows, wanted.vocab, device="cuda") * 3).bfloat16()
            line = {"kind": kind, "rows": rows, "vocab": wanted.vocab}
            ids = []
            for name, by_kernels in (("us", True), ("reference_us", False)):
                made = sampler(
                    kind, wanted.vocab, rows, by_kernels=by_kernels
                )  # its tables outlive the replays
                graph, chosen = program(made, logits)
                graph.replay()
                ids.append(chosen.clone())
                line[name] = round(microseconds(graph, 40 if by_kernels else 3), 1)
                del graph, chosen, made
            line["floor_us"] = round(logits.nbytes / COPY_RATE * 1e6, 1)
            line["differ"] = int((ids[0] != ids[1]).sum())
            differ += line["differ"]
            lines.append(json.dumps(line))
            print(lines[-1], flush=True)
    if wanted.out is not None:
        (wanted.out / "sampling.jsonl").write_text("\n".join(lines) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
