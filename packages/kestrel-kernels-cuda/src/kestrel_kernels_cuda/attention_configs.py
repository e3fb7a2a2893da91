"""Which tiles the attention kernels use: by architecture, head dim and size of a number; never tuned while serving.

Shared memory bounds them: 227 KiB per block on sm_90, 163 on sm_80, 99 on sm_86, sm_89 and sm_120. Where a step has one
row, 48: a block with more takes nearly all of the first-level cache for shared memory, which stays so for the kernels
behind it, and products of one row hold what they read in that cache (on an H200 each took 5 to 8 % longer).
"""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.spi import No, OpQuery, Yes
from kestrel.spi.batch import Limits
from kestrel_kernels_cuda.devices import arch_of, family_of, multiprocessors
from kestrel_kernels_cuda.launch import power_of_two, refuse_pages
from kestrel_kernels_cuda.overlap import overlaps

__all__ = [
    "DecodeConfig",
    "PrefillConfig",
    "Split",
    "arch_of",
    "decode_config",
    "family_of",
    "joins_in_place",
    "multiprocessors",
    "overlaps",
    "prefill_config",
    "split_of",
    "supports_heads",
]

WIDEST = 512


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``dim``, ``group``: head dim and heads of a group, padded; ``block_n`` keys a tile; ``chunk``: blocks of a row
    that the joining kernel takes at once."""

    dim: int
    group: int
    block_n: int
    warps: int
    stages: int
    chunk: int = 16
    join_warps: int = 4
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """``dim``: head dim, padded; tiles of ``block_m`` queries by ``block_n`` keys. ``packed``: the heads of a group
    share a tile. ``is_described``: keys that lie in rows are read through descriptors."""

    dim: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    packed: bool = False
    overlaps: bool = False
    is_described: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """How rows of a decode launch are divided: into ``wanted`` blocks, more when a block would exceed ``longest``
    tiles, at most ``splits``."""

    wanted: int
    longest: int
    splits: int


_DECODE: dict[str, dict[int, tuple[int, int, int]]] = {  # padded head dim to block_n, warps, stages
    "sm_90": {64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3), 512: (16, 8, 3)},
    "sm_80": {64: (64, 4, 3), 128: (64, 4, 2), 256: (32, 4, 3), 512: (16, 8, 3)},
    "small": {64: (64, 4, 2), 128: (32, 4, 3), 256: (32, 4, 2), 512: (16, 4, 2)},
}

_FEW_DECODE: dict[int, tuple[tuple[int, tuple[int, int, int]], ...]] = {  # from so many blocks of a row on
    64: ((4, (128, 4, 1)),), 128: ((4, (64, 8, 1)),), 256: ((16, (64, 8, 1)), (4, (64, 8, 3))),
    512: ((4, (16, 8, 1)),),
}  # fmt: skip
_SHORT_DECODE = {64: (64, 4, 1)}  # many rows of short contexts: several blocks on a multiprocessor
SHORTEST = 512  # keys of the longest row up to which these are used

_PREFILL: dict[str, dict[int, tuple[int, int, int, int]]] = {  # to block_m, block_n, warps, stages
    "sm_90": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2), 512: (64, 16, 8, 2)},
    "sm_80": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2), 512: (64, 16, 8, 2)},
    "small": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)},
}

_FEW_PREFILL = {("sm_90", 64): (64, 64, 4, 3)}  # where larger tiles would leave multiprocessors idle
FEW = 1024  # tokens of a launch

# Where the bounds of a window, or turning pages of 8 bits into 16, take too many registers
_WINDOW_PREFILL = {("sm_90", 256): (128, 32, 8, 2)}
_EIGHT_PREFILL = {("sm_90", 256): (128, 16, 8, 3)}

_WIDE_PREFILL = {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 32, 8, 1), 512: (16, 16, 8, 1)}  # float32

_SHORT_PREFILL = {64: (16, 128, 4, 2), 128: (16, 64, 4, 2), 256: (16, 32, 4, 3), 512: (16, 32, 8, 2)}
DESCRIBED = 128  # the widest heads whose keys are read through descriptors: at 256, pages are faster

SHORT = 16  # queries of the longest sequence up to which the heads of a group share a tile

BLOCKS_PER_PROCESSOR = {64: 2, 128: 2, 256: 1, 512: 1}  # decode blocks that one gets where rows are few
LEAST = 64  # keys of a block
LONGEST = 2048  # keys of a block, in rows that are longer than others
ALWAYS = 512  # keys of a block in deterministic launches
IDLE_PER_PROCESSOR = 32  # blocks that may find nothing to do: each costs about 0.1 us of a multiprocessor


def supports_heads(query: OpQuery) -> Yes | No:
    """Yes to head dims that fit, in groups of equal size."""
    if query.get("head_dim") > WIDEST:
        return No(f"serves head dims up to {WIDEST}, not {query.get('head_dim')}")
    if query.get("heads") % query.get("kv_heads"):
        return No("the number of heads is no multiple of that of key/value heads")
    return refuse_pages(query) or Yes()


def _bucket(dim: int) -> int:
    return max(64, power_of_two(dim))


def decode_config(
    arch: int, dim: int, group: int, itemsize: int, limits: Limits, groups: int, processors: int
) -> DecodeConfig:
    """The tiles for head dim ``dim`` and ``group`` query heads per key/value head, in a launch of ``groups`` rows times
    key/value heads; in deterministic launches by the head alone.

    What reads far ahead is long: where a block has but a tile or two, fetching its instructions would take longer.
    """
    bucket = _bucket(dim)
    tile = _DECODE[family_of(arch)][bucket]
    if not limits.is_deterministic:
        if limits.max_context_len <= SHORTEST:
            tile = _SHORT_DECODE.get(bucket, tile)
        blocks = BLOCKS_PER_PROCESSOR[bucket] * processors // max(1, groups)
        most = 1 if family_of(arch) == "small" else 3  # stages that there is memory for
        tiers = [few for least, few in _FEW_DECODE[bucket] if blocks >= least and few[2] <= most]
        tile = tiers[0] if tiers else tile
    block_n, warps, stages = tile
    if itemsize == 4:
        block_n, warps, stages = max(16, block_n // 2), max(4, min(8, warps)), min(stages, 2)
    chunk = 8 if dim > 256 else 16
    padded = max(16, power_of_two(dim)), max(16, power_of_two(group))
    return DecodeConfig(*padded, block_n, warps, stages, chunk, overlaps=overlaps(arch))


def prefill_config(
    arch: int,
    dim: int,
    group: int,
    itemsize: int,
    limits: Limits,
    window: int | None = None,
    kept: int = 2,
) -> PrefillConfig:
    """The tiles for head dim ``dim``, over pages of numbers of ``kept`` bytes; in deterministic launches by the head
    alone."""
    packed = False
    if itemsize == 4:
        tile = _WIDE_PREFILL[_bucket(dim)]
    elif limits.max_query_len <= SHORT and not limits.is_deterministic and group <= 16:
        tile, packed = _SHORT_PREFILL[_bucket(dim)], True
    else:
        tile = _PREFILL[family_of(arch)][_bucket(dim)]
        if limits.max_tokens <= FEW and not limits.is_deterministic:
            tile = _FEW_PREFILL.get((family_of(arch), _bucket(dim)), tile)
        if window is not None:
            tile = _WINDOW_PREFILL.get((family_of(arch), _bucket(dim)), tile)
        if kept == 1:
            tile = _EIGHT_PREFILL.get((family_of(arch), _bucket(dim)), tile)
    is_plain = itemsize == 2 and not packed and window is None
    is_described = family_of(arch) == "sm_90" and is_plain and dim <= DESCRIBED
    return PrefillConfig(max(16, power_of_two(dim)), *tile, packed, overlaps(arch), is_described)


def split_of(
    limits: Limits, rows: int, kv_heads: int, longest: int, config: DecodeConfig, processors: int
) -> Split:
    """How to divide rows of at most ``longest`` keys; in deterministic launches by each row's length alone."""
    block_n = config.block_n
    if limits.is_deterministic:
        tiles = ALWAYS // block_n
        return Split(1, tiles, -(-longest // (tiles * block_n)) + 1)
    groups = max(1, rows * kv_heads)
    blocks = BLOCKS_PER_PROCESSOR[_bucket(config.dim)] * processors // groups
    wanted = min(max(1, blocks), -(-longest // LEAST))
    ceiling = max(1, IDLE_PER_PROCESSOR * processors // groups)
    return Split(wanted, LONGEST // block_n, max(wanted, min(-(-longest // LONGEST), ceiling)))


def joins_in_place(limits: Limits, split: Split) -> bool:
    """Whether the last block of a row joins them all, rather than a second kernel. Never in deterministic launches:
    the two may sum in different orders, and ``split`` depends on the longest row."""
    return split.splits > 1 and not limits.is_deterministic
