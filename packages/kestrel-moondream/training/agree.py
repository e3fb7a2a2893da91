"""How many tokens of the shipped model are the same on an accelerator as on the CPU in float32, on fresh scenes.

    python -m training.agree --scenes 200 [--device cuda] [--dtype auto] [--seed 9001]
                             [--prefill-dtype fp8_e4m3]

Each scene gets one question, one caption, one point and one detect call, greedily. A sequence agrees up to its first
other token; what follows that is counted as differing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Sequence

import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine

from .evaluate import GROUPS, Case, Cases

SETTINGS = {"temperature": 0.0}


def cases_of(scenes: int, seed: int) -> list[Case]:
    """As many questions, captions, points and detections as ``scenes``."""
    cases = Cases(seed)
    kinds = sorted(set(GROUPS.values()))
    sources = [
        *(cases.questions(kind, -(-scenes // len(kinds))) for kind in kinds),
        cases.captions(scenes),
        cases.located("point", scenes),
        cases.located("detect", scenes),
    ]
    return list(itertools.chain(*sources))


async def answers(cases: Sequence[Case], **config: object) -> list[EngineResult]:
    """The answer of every case."""
    async with await InferenceEngine.create(
        RuntimeConfig.from_mapping({"model": "kestrel/nano"} | config)
    ) as engine:
        gate = asyncio.Semaphore(64)

        async def ask(case: Case) -> EngineResult:
            async with gate:
                if case.kind.startswith("caption"):
                    return await engine.caption(case.image, length=case.text, settings=SETTINGS)
                if case.kind == "point":
                    return await engine.point(case.image, case.text)
                if case.kind == "detect":
                    return await engine.detect(case.image, case.text)
                refs = [list(ref) for ref in case.refs] or None
                return await engine.query(case.image, case.text, spatial_refs=refs, settings=SETTINGS)

        return list(await asyncio.gather(*map(ask, cases)))


def same(left: Sequence[object], right: Sequence[object]) -> int:
    """Tokens up to the first that differs."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


async def compare(args: argparse.Namespace) -> None:
    """Print the share of equal tokens and of equal answers."""
    cases = cases_of(args.scenes, args.seed)
    expected = await answers(cases, device="cpu", dtype="float32")
    found = await answers(cases, device=args.device, dtype=args.dtype, prefill_dtype=args.prefill_dtype)
    longest = sum(max(len(a.tokens), len(b.tokens)) for a, b in zip(expected, found, strict=True))
    equal = sum(same(a.tokens, b.tokens) for a, b in zip(expected, found, strict=True))
    whole = sum(a.output == b.output for a, b in zip(expected, found, strict=True))
    print(f"{args.device} {args.dtype}: {equal} of {longest} tokens ({equal / longest:.3%}) agree with the CPU, "
          f"{whole} of {len(cases)} answers are equal")  # fmt: skip


def main() -> None:
    """Parse and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=9001)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prefill-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    asyncio.run(compare(args))


if __name__ == "__main__":
    main()
