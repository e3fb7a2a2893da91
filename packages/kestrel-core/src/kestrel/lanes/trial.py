"""The largest launches of a token model, made on scratch to see what memory they take before its pools are sized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from kestrel.config import MAX_TOP_LOGPROBS, RuntimeConfig
from kestrel.device import allocated_memory, has_streams, peak_memory, reset_peak
from kestrel.lanes.build import feature_pool
from kestrel.lanes.examples import example
from kestrel.ops import OpTable
from kestrel.runner import ChunkRun, Runner
from kestrel.sampling import Sampler, SamplingParams
from kestrel.sampling.params import ALWAYS
from kestrel.spi.driver import TokenDriver, TokenSpec
from kestrel.spi.media import MediaSpec
from kestrel.spi.states import WindowKV
from kestrel.state import PoolSizes, StateCache, pool_bytes
from kestrel.types import Prepared

__all__ = ["launch_memory"]


def launch_memory(
    driver: TokenDriver,
    config: RuntimeConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpTable | None = None,
) -> int:
    """Bytes that launches take at most, beside weights and state: activations, logits of every row with all that
    sampling can be asked for, the tables of rows and sampling, the pool of media features.

    Measured on ``device`` by its own counter, on the device's thread. ``ops`` serve sampling; None: the references.
    Raises what a launch raises.
    """
    sizes = _least_sizes(driver.spec)
    before = allocated_memory(device)
    reset_peak(device)
    with torch.inference_mode():
        _launch_all(driver, config, sizes, ops, device, dtype)
    state = pool_bytes(driver.spec, sizes, dtype=dtype, page_size=config.page_size)
    return max(0, peak_memory(device) - before - state)


def _launch_all(
    driver: TokenDriver,
    config: RuntimeConfig,
    sizes: PoolSizes,
    ops: OpTable | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    spec, rows = driver.spec, config.max_batch_size
    max_len = min(config.max_model_len or spec.max_positions, spec.max_positions)
    cache = StateCache(
        spec, device=device, dtype=dtype, page_size=config.page_size, sizes=sizes, prefix_cache=False
    )
    sampler = Sampler(spec, rows, device, ops=ops)
    runner = Runner(
        driver,
        cache,
        sampler,
        feature_pool(spec, config, max_len, device=device, dtype=dtype),
        max_rows=rows,
        max_len=max_len,
        overlaps=(config.steps_in_flight or 1 + has_streams(device)) > 1,
        device=device,
        pads=config.deterministic,
        ops=ops,
    )
    for row in range(rows):
        sampler.set_row(row, _everything(spec), seed=row)
    budget = config.max_batched_tokens
    few = [min(max_len, budget - start) for start in range(0, budget, max_len)][:rows]
    many = [max(1, min(max_len, budget // rows))] * min(rows, budget)
    for lengths in (few, many):
        chunks = [_chunk(spec, row, length) for row, length in enumerate(lengths)]
        pending = runner.prefill(chunks).pending
        assert pending is not None
        pending.read()
    stage = runner.stage(rows)
    stage.blank()
    runner.decode(stage).read()
    for media in spec.media:
        items = _largest(driver, media)
        if items:
            runner.encode(media.kind, items)


def _least_sizes(spec: TokenSpec) -> PoolSizes:
    """Pools that hold hardly more than scratch."""
    windows: Mapping[int, int] = {state.window: 1 for state in spec.states if isinstance(state, WindowKV)}
    return PoolSizes(pages=1, window_pages=MappingProxyType(dict(windows)), live_slots=1, cross_entries=1)


def _everything(spec: TokenSpec) -> SamplingParams:
    """Parameters of a row that asks for all that costs memory."""
    return SamplingParams(
        temperature=1.0,
        top_k=min(50, spec.vocab_size - 1),
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        biases=((0, 0.0, 0, ALWAYS),),
        stop_ids=frozenset({0}),
        logprobs=True,
        top_logprobs=min(MAX_TOP_LOGPROBS, spec.vocab_size),
        needs_aux=spec.aux_width > 0,
    )


def _chunk(spec: TokenSpec, row: int, length: int) -> ChunkRun:
    """A prompt of ``length`` tokens that nobody asked for."""
    return ChunkRun(
        row=row,
        lease=None,
        start=0,
        ids=np.zeros(length, dtype=np.int64),
        aux=np.zeros((length, spec.aux_width), dtype=np.int64),
        positions=np.tile(np.arange(length, dtype=np.int64), (spec.position_rows, 1)),
        samples=True,
    )


def _largest(driver: TokenDriver, media: MediaSpec) -> Sequence[Prepared]:
    """Items that fill an encoder launch of one kind, as far as the kind is one that everybody knows."""
    item = example(driver, media.kind)
    return () if item is None else [item] * max(1, media.max_cost // max(1, item.cost))
