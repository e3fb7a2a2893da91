"""A token lane from settings: pools sized, sampler and features made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kestrel.config import RuntimeConfig
from kestrel.device import free_memory, has_streams
from kestrel.errors import CapacityError
from kestrel.lanes.events import Event
from kestrel.lanes.limits import LaneConfig
from kestrel.lanes.token import TokenLane
from kestrel.ops import OpTable
from kestrel.sampling import Sampler
from kestrel.spi.driver import TokenDriver, TokenSpec
from kestrel.state import FeaturePool, PoolSizes, StateCache, fixed_pages, plan_sizes, pool_bytes

__all__ = ["build_token_lane", "feature_pool"]

LEAST_FEATURE_ROWS = 8192  # some large pictures beside each other; 32 MiB at 2048 hidden numbers of 16 bits


def build_token_lane(
    driver: TokenDriver,
    config: RuntimeConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_bytes: int,
    sink: Callable[[list[Event]], None],
    setting: str = "kv_cache_bytes",
    ops: OpTable | None = None,
) -> TokenLane:
    """A lane with state of ``kv_bytes`` (named ``setting`` in errors), or of ``config.kv_cache_pages`` pages.

    ``ops`` serve sampling and copies of pages; None: the references. Without ``max_model_len`` the context is as long
    as the model allows and the memory holds. Raises CapacityError with the bytes needed, those given and what to
    change.
    """
    spec = driver.spec
    depth = config.steps_in_flight or (2 if has_streams(device) else 1)
    max_ahead = depth * (config.max_batched_tokens + 1)
    max_len = min(config.max_model_len or spec.max_positions, spec.max_positions)

    def sizes_for(length: int) -> PoolSizes:
        if config.kv_cache_pages is not None:
            return _fixed(spec, config, config.kv_cache_pages, device, dtype)
        return plan_sizes(
            spec,
            kv_bytes,
            dtype=dtype,
            page_size=config.page_size,
            max_rows=config.max_batch_size,
            max_len=length,
            max_ahead=max_ahead,
            setting=setting,
        )

    if config.max_model_len is None:
        max_len = _longest(max_len, config.page_size, sizes_for)
    cache = StateCache(
        spec,
        device=device,
        dtype=dtype,
        page_size=config.page_size,
        sizes=sizes_for(max_len),
        max_ahead=max_ahead,
        prefix_cache=config.enable_prefix_cache,
        ops=ops,
    )
    return TokenLane(
        driver,
        cache=cache,
        sampler=Sampler(spec, config.max_batch_size, device, ops=ops, logits_dtype=dtype),
        features=feature_pool(spec, config, max_len, device=device, dtype=dtype),
        config=_lane_config(config, max_len, depth),
        device=device,
        sink=sink,
        ops=ops,
    )


def _lane_config(config: RuntimeConfig, max_len: int, depth: int) -> LaneConfig:
    return LaneConfig(
        max_rows=config.max_batch_size,
        max_batched_tokens=config.max_batched_tokens,
        max_len=max_len,
        steps_in_flight=depth,
        max_queue=config.max_queue,
        prefix_cache=config.enable_prefix_cache,
        deterministic=config.deterministic,
    )


def feature_pool(
    spec: TokenSpec, config: RuntimeConfig, max_len: int, *, device: torch.device, dtype: torch.dtype
) -> FeaturePool | None:
    """Room for media features of prompts of up to ``max_len`` positions, and for as many as two launches take: one
    shows some while the encoder makes the next. None for a model that shows none there."""
    if not any(media.into == "positions" for media in spec.media):
        return None
    rows = min(
        max(max_len, 2 * config.max_batched_tokens), max(LEAST_FEATURE_ROWS, 4 * config.max_batched_tokens)
    )
    return FeaturePool(rows, spec.hidden_size, device=device, dtype=dtype)


def _fixed(
    spec: TokenSpec, config: RuntimeConfig, pages: int, device: torch.device, dtype: torch.dtype
) -> PoolSizes:
    """Pools of ``pages`` pages; CapacityError when the device has no room for them."""
    sizes = fixed_pages(spec, pages, max_rows=config.max_batch_size)
    needed, free = pool_bytes(spec, sizes, dtype=dtype, page_size=config.page_size), free_memory(device)
    if needed > free:
        raise CapacityError(
            f"kv_cache_pages is {pages}, which with {config.max_batch_size} rows takes {needed / 2**30:,.2f} GiB of "
            f"state, and {device} has {free / 2**30:,.2f} GiB free. Lower kv_cache_pages, max_batch_size or page_size."
        )
    return sizes


def _longest(upper: int, page_size: int, sizes_for: Callable[[int], PoolSizes]) -> int:
    """The longest context, up to ``upper``, that the memory holds; CapacityError when not even a page fits."""
    if _holds(upper, sizes_for):
        return upper
    low, high = 0, -(-upper // page_size)  # in pages; ``high`` does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if _holds(middle * page_size, sizes_for):
            low = middle
        else:
            high = middle
    if not low:
        sizes_for(page_size)  # raises with the numbers
    return low * page_size


def _holds(length: int, sizes_for: Callable[[int], PoolSizes]) -> bool:
    try:
        sizes_for(length)
    except CapacityError:
        return False
    return True
