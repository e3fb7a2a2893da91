"""Hugging Face transformers on the checkpoints that ``gpu.py`` wrote, in the same process, for its ``--peers``.

Greedy generation in bfloat16, by a static cache where the model takes one. What fails is a line of the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_media import TOKENS, windows
from gpu_models import WHISPER_EOT
from gpu_report import DEVICE, Report

__all__ = ["qwen_peer", "whisper_peer"]

NEW = 64  # tokens after a prompt
SHORT = 8  # tokens of the run that is subtracted
CACHES = ("static", "dynamic")


@contextmanager
def reported(report: Report, what: str) -> Iterator[None]:
    """Whatever another project raises is told, and the run goes on."""
    try:
        yield
    except Exception as error:
        told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        report.rows.append({"case": "peers", "what": what, "error": told})
        print(f"{'peers':<10} {what:<44} failed: {told[:160]}", flush=True)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def seconds(run: Callable[[], object]) -> float:
    """How long ``run`` takes, the device's work included."""
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def working_cache(generate: Callable[[str], object], report: Report, what: str) -> str:
    """The first of ``CACHES`` that ``generate`` takes; why another does not is told."""
    for cache in CACHES[:-1]:
        try:
            generate(cache)
        except Exception as error:
            print(f"{'peers':<10} {what}: no {cache} cache ({type(error).__name__})", flush=True)
        else:
            return cache
    generate(CACHES[-1])
    return CACHES[-1]


def ratio_to(report: Report, case: str, what: str, value: float, *, lower_is_better: bool) -> dict[str, Any]:
    """How many times better our value of the same run is, where there is one."""
    ours = next((row["value"] for row in report.rows if row["case"] == case and row["what"] == what), None)
    if not ours:
        return {}
    return {"kestrel": round(ours, 3), "ratio": round(value / ours if lower_is_better else ours / value, 2)}


def qwen_peer(
    path: Path, report: Report, size: str, batches: Sequence[int], prompt: int, *, is_compiled: bool
) -> None:
    """Milliseconds of a decode step: the difference between runs of 72 and of 8 tokens, over 64."""
    with reported(report, f"transformers, Qwen3.5-{size}"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE).eval()
        for batch in batches:
            what = f"transformers, Qwen3.5-{size} batch {batch}"
            with reported(report, what), torch.inference_mode():
                ids = torch.randint(32, 256, (batch, prompt), device=DEVICE)

                def generate(cache: str, new: int = SHORT, ids: torch.Tensor = ids) -> object:
                    return model.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                        do_sample=False, cache_implementation=cache, disable_compile=not is_compiled,
                        pad_token_id=0,
                    )  # fmt: skip

                cache = working_cache(generate, report, what)
                steps = []
                for _ in range(2):
                    short = seconds(lambda g=generate, c=cache: g(c, SHORT))
                    long = seconds(lambda g=generate, c=cache: g(c, SHORT + NEW))
                    steps.append((long - short) / NEW * 1e3)
                step = statistics.median(steps)
                ratio = ratio_to(
                    report, "decode", f"Qwen3.5-{size} batch {batch}", step, lower_is_better=True
                )
                report.add("peers", what, step, "ms/step", cache=cache, compiled=is_compiled, **ratio)


def whisper_peer(path: Path, report: Report, batches: Sequence[int], *, is_compiled: bool) -> None:
    """Seconds of sound per second, features included: ``TOKENS`` greedy tokens of each window."""
    with reported(report, "transformers, large-v3-turbo"):
        from transformers import GenerationMixin, WhisperFeatureExtractor, WhisperForConditionalGeneration

        model = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE).eval()
        extract = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
        names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
        ids = dict(zip(names, (model.config.decoder_start_token_id, *[WHISPER_EOT] * 2), strict=True))
        source = np.random.default_rng(0)
        for batch in batches:
            what = f"transformers, large-v3-turbo, {batch} at a time"
            with reported(report, what), torch.inference_mode():
                sounds = windows(batch, source)

                def generate(cache: str, sounds: list[np.ndarray] = sounds) -> object:
                    made = extract(
                        sounds, sampling_rate=16_000, return_tensors="pt", device=str(DEVICE)
                    ).input_features
                    return GenerationMixin.generate(
                        model, made.to(DEVICE, torch.bfloat16), max_new_tokens=TOKENS,
                        min_new_tokens=TOKENS, do_sample=False, cache_implementation=cache, **ids,
                        disable_compile=not is_compiled,
                    )  # fmt: skip

                cache = working_cache(generate, report, what)
                wall = statistics.median(seconds(lambda g=generate, c=cache: g(c)) for _ in range(3))
                rtfx = 30 * batch / wall
                ratio = ratio_to(
                    report, "whisper", f"large-v3-turbo, {batch} at a time", rtfx, lower_is_better=False
                )
                report.add("peers", what, rtfx, "RTFx", cache=cache, compiled=is_compiled, **ratio)
