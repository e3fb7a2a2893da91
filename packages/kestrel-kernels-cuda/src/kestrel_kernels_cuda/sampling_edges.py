"""Where the edge of top-k and top-p lies among a row's candidates: their keys and ids, in the order of ids."""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.ordering import value_of

__all__ = ["edge_by_bisection", "edge_by_ranks", "mass_of"]


@triton.jit
def mass_of(x, best, temperature):
    """Exponentials of tempered logits, 1 at the best."""
    return tl.exp((x - best) / temperature)


@triton.jit
def count_above(orders, num, threshold, BLOCK: tl.constexpr):
    """How many candidates have keys above ``threshold``."""
    count = num * 0
    for start in range(0, num, BLOCK):
        place = start + tl.arange(0, BLOCK)
        order = tl.load(orders + place, mask=place < num, other=0)
        count += tl.sum(((place < num) & (order > threshold)).to(tl.int32), axis=0)
    return count


@triton.jit
def mass_above(orders, num, threshold, best, temperature, BLOCK: tl.constexpr):
    """The mass of the candidates whose keys are above ``threshold``."""
    mass = best * 0.0
    for start in range(0, num, BLOCK):
        place = start + tl.arange(0, BLOCK)
        order = tl.load(orders + place, mask=place < num, other=0)
        is_above = (place < num) & (order > threshold)
        mass += tl.sum(tl.where(is_above, mass_of(value_of(order), best, temperature), 0.0), axis=0)
    return mass


@triton.jit
def extremes(orders, num, BLOCK: tl.constexpr):
    """The lowest and highest key of the candidates."""
    lowest = num * 0 + 0x7FFFFFFF
    highest = -0x7FFFFFFF - num * 0
    for start in range(0, num, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_in = place < num
        order = tl.load(orders + place, mask=is_in, other=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_in, order, 0x7FFFFFFF), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(is_in, order, -0x7FFFFFFF), axis=0))
    return lowest, highest


@triton.jit
def lowest_by_count(orders, num, lowest, highest, most, BLOCK: tl.constexpr):
    """The lowest key above which there are at most ``most`` candidates."""
    low, high = lowest, highest
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        fits = count_above(orders, num, middle, BLOCK) <= most
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low


@triton.jit
def lowest_by_mass(orders, num, lowest, highest, most, best, temperature, BLOCK: tl.constexpr):
    """The lowest key above which candidates have a mass of at most ``most``."""
    low, high = lowest, highest
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        fits = mass_above(orders, num, middle, best, temperature, BLOCK) <= most
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low


@triton.jit
def edge_by_ranks(
    orders, ids, num, top_k, top_p, has_k, has_p, count_before, mass_before, total, best, temperature,
    FEW: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Threshold and cut where candidates are few: each one's rank and the mass before it by comparing all pairs."""
    place = tl.arange(0, FEW)
    is_in = place < num
    order = tl.load(orders + place, mask=is_in, other=0)
    mass = tl.where(is_in, mass_of(value_of(order), best, temperature), 0.0)
    rank = place * 0
    before = mass * 0.0
    for start in range(0, num, STEP):
        other = start + tl.arange(0, STEP)
        other_order = tl.load(orders + other, mask=other < num, other=0)
        other_mass = mass_of(value_of(other_order), best, temperature)
        is_ahead = (other_order[None, :] > order[:, None]) | (
            (other_order[None, :] == order[:, None]) & (other[None, :] < place[:, None])
        )
        is_ahead = is_ahead & (other < num)[None, :]
        rank += tl.sum(is_ahead.to(tl.int32), axis=1)
        before += tl.sum(tl.where(is_ahead, other_mass[None, :], 0.0), axis=1)
    kept = is_in
    if has_k:
        kept = kept & (count_before + rank < top_k)
        total = mass_before + tl.sum(tl.where(kept, mass, 0.0), axis=0)
    if has_p:
        kept = kept & (mass_before + before <= top_p * total)
    lowest = tl.min(tl.where(kept, order, 0x7FFFFFFF), axis=0)
    # when rounding leaves none of them, the bins before them stay
    lowest = tl.where(
        tl.max(kept.to(tl.int32), axis=0) > 0, lowest, tl.max(tl.where(is_in, order, -0x7FFFFFFF), axis=0)
    )
    token = tl.load(ids + place, mask=is_in, other=0)
    return lowest, tl.max(tl.where(kept & (order == lowest), token, -1), axis=0)


@triton.jit
def edge_by_bisection(
    orders, ids, num, top_k, top_p, has_k, has_p, count_before, mass_before, total, best, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Threshold and cut where candidates are many."""
    lowest, highest = extremes(orders, num, BLOCK)
    threshold = lowest
    num_level = num
    if has_k:
        threshold = lowest_by_count(orders, num, lowest, highest, top_k - 1 - count_before, BLOCK)
        num_level = top_k - count_before - count_above(orders, num, threshold, BLOCK)
        mass = mass_above(orders, num, threshold, best, temperature, BLOCK)
        level_mass = mass_of(value_of(threshold), best, temperature)
        total = mass_before + mass + num_level.to(tl.float32) * level_mass
    if has_p:
        bound = top_p * total - mass_before
        edge = lowest_by_mass(orders, num, lowest, highest, bound, best, temperature, BLOCK)
        mass = mass_above(orders, num, edge, best, temperature, BLOCK)
        level_mass = mass_of(value_of(edge), best, temperature)
        # without any mass every one of them fits
        num_fit = tl.minimum((bound - mass) / tl.where(level_mass > 0.0, level_mass, 1.0), 1.0e9)
        num_fit = tl.maximum(tl.where(level_mass > 0.0, num_fit, 1.0e9), 0.0).to(tl.int32) + 1
        both = tl.where(edge == threshold, tl.minimum(num_fit, num_level), num_level)
        num_level = tl.where(edge > threshold, num_fit, both)
        threshold = tl.maximum(edge, threshold)
    cut = num * 0 + 0x7FFFFFFF
    met = num * 0
    for start in range(0, num, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_in = place < num
        is_level = is_in & (tl.load(orders + place, mask=is_in, other=0) == threshold)
        rank = met + tl.cumsum(is_level.to(tl.int32), axis=0)
        token = tl.load(ids + place, mask=is_in, other=0)
        found = tl.max(tl.where(is_level & (rank == num_level), token, -1), axis=0)
        cut = tl.where(found >= 0, found, cut)
        met += tl.sum(is_level.to(tl.int32), axis=0)
    return threshold, cut
