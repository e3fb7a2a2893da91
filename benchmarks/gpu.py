"""The engine on one NVIDIA GPU: published sizes with random weights, as shares of what the machine can do.

    python benchmarks/gpu.py [--cases ceilings decode prefill idle whisper photo questions] [--size 4B] [--json FILE]
                             [--weights DIR] [--weights-dtype fp8] [--peers [compiled]] [--set decode_path=native …]

``ceilings``: a large copy and a large product, which the floors below are computed from. ``decode``: a step
of Qwen at batch 1, 16, 64, 256 with prompts of 1,024; the difference between the medians of five runs of 144
and five of 16 tokens, whose prompts the prefix cache holds, over 128. ``prefill``: TTFT at batch 1, and 16
prompts at once, nothing cached. ``idle``: the share of time in which no kernel runs, with 64 streaming
consumers; beside eight threads that decode JPEGs; beside eight that have processes decode them.
``whisper``: windows of 30 s of noise, 112 tokens each. ``photo``: Moondream 2, a question on distinct JPEGs of
800 × 600, 1 and 64 at a time; ``photo8``, not among the default cases: the same with ``prefill_dtype="fp8_e4m3"``, 3
tokens alone. ``questions``: five on each of three photos, shuffled. ``--cold`` compiles every kernel
again, as a new installation would. ``--weights-dtype fp8``: Qwen's products are with 8-bit floats. ``--peers`` runs
Hugging Face transformers on the same checkpoints, and says how many times as fast the engine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_media import photo, questions, whisper
from gpu_models import eight_bit_weights, write_moondream, write_qwen, write_whisper
from gpu_peers import qwen_peer, whisper_peer
from gpu_probe import copy_rate, gemm_rate
from gpu_report import DEVICE, Report, opened
from gpu_text import PROMPT, QWEN_BYTES, decode, idle, prefill

CASES = ("ceilings", "decode", "prefill", "idle", "whisper", "photo", "questions")
ON_REQUEST = ("photo8",)


def as_value(text: str) -> Any:
    """A setting as JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def run(args: argparse.Namespace, report: Report) -> None:
    """All cases asked for, each model loaded once."""
    settings = {name: as_value(text) for name, text in (pair.split("=", 1) for pair in args.set)}
    print(
        f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    wanted = set(args.cases)
    if "ceilings" in wanted:
        report.copy_tb_s, report.gemm_tflop_s = copy_rate(DEVICE), gemm_rate(DEVICE)
        report.add("ceilings", "copy", report.copy_tb_s, "TB/s")
        report.add("ceilings", "bfloat16 product, 4096 × 8192 × 8192", report.gemm_tflop_s, "TFLOP/s")
    if wanted & {"decode", "prefill", "idle"}:
        await text_cases(args, report, settings)
    if "whisper" in wanted:
        path = written(args.weights / "whisper", lambda path: write_whisper(path, "large-v3-turbo", DEVICE))
        async with opened(path, report, "whisper", max_batch_size=64, **settings) as engine:
            await whisper(engine, report, (1, 4, 16, 64))
        if args.peers:
            whisper_peer(path, report, (1, 4, 16), is_compiled=args.peers == "compiled")
    if wanted & {"photo", "photo8", "questions"}:
        path = written(args.weights / "moondream", lambda path: write_moondream(path, DEVICE))
    sizes = {"max_batch_size": 64, "max_batched_tokens": 4096, **settings}
    if "photo8" in wanted:
        async with opened(path, report, "photo8", **sizes, prefill_dtype="fp8_e4m3") as engine:
            await photo(engine, report, (3,), "photo8")
    if wanted & {"photo", "questions"}:
        async with opened(path, report, "photo", **sizes) as engine:
            if "photo" in wanted:
                await photo(engine, report)
            if "questions" in wanted:
                await questions(engine, report)


async def text_cases(args: argparse.Namespace, report: Report, settings: Mapping[str, Any]) -> None:
    """The cases of Qwen."""
    is_fp8 = args.weights_dtype == "fp8"
    path = written(
        args.weights / f"qwen-{args.size}{'-fp8' if is_fp8 else ''}",
        lambda path: write_qwen(path, args.size, DEVICE, fp8=is_fp8),
    )
    sizes: dict[str, Any] = {
        "max_batch_size": max(args.batches),
        "max_model_len": 4096,
        "max_batched_tokens": 8192,
    }
    if is_fp8:
        sizes["fp8_weights"] = "keep"
    async with opened(path, report, "decode", **(sizes | settings)) as engine:
        if "decode" in args.cases:
            spared = float(eight_bit_weights(args.size)) if is_fp8 else 0.0
            await decode(engine, report, args.size, args.batches, spared)
        if "prefill" in args.cases:
            await prefill(engine, report, args.size)
        if "idle" in args.cases:
            for threads, processes in ((0, 0), (8, 0), (8, 8)):
                await idle(engine, report, args.size, threads, processes)
    if args.peers and not is_fp8:
        batches = [batch for batch in (1, 16) if batch in args.batches]
        qwen_peer(path, report, args.size, batches, PROMPT, is_compiled=args.peers == "compiled")


def written(path: Path, write: Callable[[Path], None]) -> Path:
    """The checkpoint in ``path``, written by the first run that wants it."""
    if not path.exists():
        write(path)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return path


def main() -> None:
    """Measure and print; ``--json`` keeps the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES + ON_REQUEST, default=list(CASES))
    parser.add_argument("--size", default="4B", choices=sorted(QWEN_BYTES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument(
        "--weights", type=Path, default=Path(tempfile.gettempdir()) / "kestrel-random-weights"
    )
    parser.add_argument("--weights-dtype", default="bf16", choices=("bf16", "fp8"), help="of dense Qwen")
    parser.add_argument("--peers", nargs="?", const="eager", choices=("eager", "compiled"),
                        help="also run Hugging Face transformers: op by op, or by torch.compile")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    parser.add_argument("--cold", action="store_true", help="compile every kernel again")
    parser.add_argument("--log", action="store_true", help="print what the engine logs")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each case")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="also keep when each kernel ran")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU; torch sees none")
    if args.weights_dtype == "fp8" and args.size == "35B-A3B":
        parser.error("--weights-dtype fp8 is for dense models")
    if args.log:
        logging.basicConfig(level=logging.WARNING, format="    %(relativeCreated)d ms %(name)s %(message)s")
        logging.getLogger("kestrel").setLevel(logging.INFO)
        logging.getLogger("kestrel.request").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as cache:
        if args.trace:
            args.trace.mkdir(parents=True, exist_ok=True)
        if args.cold:
            os.environ["TRITON_CACHE_DIR"] = cache
        report = Report(args.profile, args.trace)
        try:
            asyncio.run(run(args, report))
        finally:
            if args.json:
                args.json.write_text(json.dumps(report.rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
