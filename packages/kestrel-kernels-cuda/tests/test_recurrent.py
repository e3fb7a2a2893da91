"""The recurrent kernels on fresh random launches beyond core's shared cases, and what the contract leaves to say."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops import OPS, Inputs
from kestrel.ops.causal_conv import _make as make_conv
from kestrel.ops.gated_delta import _make as make_rule
from kestrel.ops.gated_delta_step import _make as make_step
from kestrel.ops.recurrent_cases import RecurrentShape
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.causal_conv import causal_conv
from kestrel_kernels_cuda.gated_delta import gated_delta
from kestrel_kernels_cuda.gated_delta_step import gated_delta_step
from kestrel_kernels_cuda.recurrent_plan import CHUNK, plan_of

Make = Callable[[RecurrentShape, int, torch.device, torch.dtype], Inputs]


def _conv(shape: RecurrentShape, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    return make_conv(shape, 4, "silu", seed, device, dtype)


PREFILL = {"causal_conv": (causal_conv, _conv), "gated_delta": (gated_delta, make_rule)}


def _view(inputs: Inputs) -> RecurrentView:
    return next(x for x in inputs.args if isinstance(x, RecurrentView))


def _run(fn: Callable[..., torch.Tensor], inputs: Inputs) -> list[torch.Tensor]:
    out = fn(*inputs.args, **inputs.kwargs)
    return [out[: inputs.num_rows], *(x.clone() for x in inputs.written)]


def _swap(inputs: Inputs, **fields: Any) -> Inputs:
    args = tuple(replace(x, **fields) if isinstance(x, RecurrentView) else x for x in inputs.args)
    return replace(inputs, args=args)


def _assert_agree(name: str, got: list[torch.Tensor], want: list[torch.Tensor], dtype: torch.dtype) -> None:
    allowed = OPS[name].tolerance(dtype)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=allowed.atol, rtol=allowed.rtol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(PREFILL))
@pytest.mark.parametrize(
    ("lens", "stores"),
    [
        ((1,) * 11 + (2,) * 5, ((3, 1), (12, 2), (12, 1))),
        ((197,), ((0, 191), (0, 192), (0, 193))),
        ((0, 64, 0, 65), ((1, 64), (3, 63))),
        ((3, 128, 31), ()),
        ((70, 66), ((1, 66), (0, 9), (1, 3), (0, 65), (1, 2), (1, 65), (0, 8)) + ((0, 70),) * 30),
    ],
    ids=["many short", "one long", "empty rows", "a chunk's end", "many checkpoints"],
)
def test_odd_launches_agree_with_the_reference(
    name: str, lens: tuple[int, ...], stores: Any, dtype: torch.dtype, place: torch.device
) -> None:
    fn, make = PREFILL[name]
    shape = RecurrentShape(lens=lens, stores=stores, key_heads=1, heads=2, key_dim=12, value_dim=20)
    seed = random.randrange(2**30)
    want = _run(OPS[name].reference, make(shape, seed, place, dtype))
    _assert_agree(name, _run(fn, make(shape, seed, place, dtype)), want, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("repeats", [1, 0], ids=["a key again and again", "fresh keys"])
def test_a_state_that_hardly_decays_gathers_no_error(
    repeats: int, dtype: torch.dtype, place: torch.device
) -> None:
    """Each token overwrites most of what the one before wrote, so an error of either would stay, were both not made
    from the same rounded numbers."""
    shape = RecurrentShape(lens=(150,), key_heads=1, heads=1, key_dim=64, value_dim=64)
    mine, theirs = (make_rule(shape, 7, place, dtype) for _ in range(2))
    for inputs in (mine, theirs):
        _, k, _, gate, beta, *_ = inputs.args
        if repeats:
            k.copy_(k[:1].expand_as(k).clone())
        gate.fill_(-1e-3)
        beta.fill_(0.97)
    allowed = 4 * OPS["gated_delta"].tolerance(dtype).atol
    got, want = _run(gated_delta, mine), _run(OPS["gated_delta"].reference, theirs)
    for here, there in zip(got, want, strict=True):
        torch.testing.assert_close(here, there, atol=allowed, rtol=allowed, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", [(13, 197, 31, 64), (1500, 1, 2000)])
def test_chunks_of_the_published_head_agree_with_the_reference(
    lens: tuple[int, ...], dtype: torch.dtype, place: torch.device
) -> None:
    stores = ((0, 13), (1, 64), (1, 65), (1, 197)) if len(lens) == 4 else ((2, 1984), (0, 1), (1, 1))
    shape = RecurrentShape(lens=lens, stores=stores, key_heads=2, heads=4, key_dim=128, value_dim=128)
    seed = random.randrange(2**30)
    want = _run(OPS["gated_delta"].reference, make_rule(shape, seed, place, dtype))
    _assert_agree("gated_delta", _run(gated_delta, make_rule(shape, seed, place, dtype)), want, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_is_written_before_it_is_read(
    dtype: torch.dtype, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        fresh = plain(*size, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() and not fresh.is_meta else fresh

    shape = RecurrentShape(lens=(5, 70, 13), stores=((1, 64), (1, 66), (2, 13)), key_dim=5, value_dim=7)
    mine, theirs = (make_rule(shape, 6, place, dtype) for _ in range(2))
    want = _run(OPS["gated_delta"].reference, theirs)
    monkeypatch.setattr(torch, "empty", poisoned)
    _assert_agree("gated_delta", _run(gated_delta, mine), want, dtype)


@pytest.mark.parametrize("name", sorted(PREFILL))
def test_a_sequence_alone_gives_the_bits_it_gives_among_others(name: str, place: torch.device) -> None:
    fn, make = PREFILL[name]
    shape = RecurrentShape(lens=(70, 5, 9), stores=((1, 3),), captured=True)
    together = make(shape, 3, place, torch.float32)
    view = _view(together)
    pools = {part: pool.clone() for part, pool in view.parts.items()}
    first, end = view.cu_seqlens[1:3].tolist()
    out = fn(*together.args)[first:end]
    lone = replace(
        view, parts=pools, slots_B=view.slots_B[1:2], cu_seqlens=torch.tensor([0, end - first], device=place).int()
    )  # fmt: skip
    lone.stores[0, 0] = 0
    args = [lone if x is view else x for x in together.args]
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.shape[0] == shape.tokens:
            args[i] = x[first:end]
    assert torch.equal(fn(*args), out)
    for part, pool in pools.items():
        slots = torch.cat((view.slots_B[1:2], lone.stores[:1, 2]))
        assert torch.equal(pool[1, slots], view.parts[part][1, slots])


def test_tokens_behind_the_last_sequence_come_out_finite(place: torch.device) -> None:
    shape = RecurrentShape(lens=(1, 2), captured=True, spare_tokens=70)
    for fn, make in PREFILL.values():
        assert fn(*make(shape, 1, place, torch.float32).args).isfinite().all()


def test_dead_rows_of_a_step_give_zeros_and_touch_no_live_slot(place: torch.device) -> None:
    inputs = make_step(RecurrentShape(lens=(1,) * 5), 2, place, torch.float32)
    slots = _view(inputs).slots_B.clone()
    slots[torch.tensor([1, 3, 4])] = 0
    inputs = _swap(inputs, slots_B=slots)
    before = [x.clone() for x in inputs.written]
    out = gated_delta_step(*inputs.args)
    assert not out[[1, 3, 4]].any()
    assert out[[0, 2]].all()
    moved = [s - 1 for s in slots[slots > 0].tolist()]
    kept = [s for s in range(before[0].shape[1]) if s not in moved]
    for now, then in zip(inputs.written, before, strict=True):
        assert torch.equal(now[:, kept].nan_to_num(), then[:, kept].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_after_steps_agree_with_the_reference(dtype: torch.dtype, place: torch.device) -> None:
    shape = RecurrentShape(lens=(1,) * 3, key_heads=2, heads=6, stores=((1, 1), (2, 1)))
    mine, theirs = (make_step(shape, 4, place, dtype) for _ in range(2))
    for _ in range(3):
        got, want = _run(gated_delta_step, mine), _run(OPS["gated_delta_step"].reference, theirs)
        _assert_agree("gated_delta_step", got, want, dtype)


def test_a_step_agrees_with_the_reference_for_the_published_head(place: torch.device) -> None:
    shape = RecurrentShape(lens=(1, 1), key_heads=1, heads=2, key_dim=128, value_dim=128, stores=((1, 1),))
    seed = random.randrange(2**30)
    mine, theirs = (make_step(shape, seed, place, torch.float32) for _ in range(2))
    got, want = _run(gated_delta_step, mine), _run(OPS["gated_delta_step"].reference, theirs)
    _assert_agree("gated_delta_step", got, want, torch.float32)


def test_a_step_takes_parts_of_one_projection(place: torch.device) -> None:
    plain, packed = (make_step(RecurrentShape(lens=(1, 1)), 5, place, torch.float32) for _ in range(2))
    sizes = [x[0].numel() for x in packed.args[:4]]
    joined = torch.cat([x.flatten(1) for x in packed.args[:4]], dim=1)
    parts = [
        part.unflatten(1, x.shape[1:])
        for part, x in zip(joined.split(sizes, dim=1), packed.args[:4], strict=True)
    ]
    packed = replace(packed, args=(*parts, *packed.args[4:]))
    for got, want in zip(_run(gated_delta_step, packed), _run(gated_delta_step, plain), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_the_plan_covers_each_token_once_and_no_launch_outgrows_it(place: torch.device) -> None:
    for lens, spare in (((1,) * 9, 0), ((64, 65, 0, 127), 3), ((200,), 70)):
        shape = RecurrentShape(lens=lens, captured=True, spare_tokens=spare)
        inputs = make_rule(shape, 1, place, torch.float32)
        view = _view(inputs)
        plan = plan_of(view, 0, shape.tokens)
        ends = [*view.cu_seqlens[1:].tolist(), shape.tokens]
        seen: list[int] = []
        for row, first in zip(plan.row_N.tolist(), plan.first_N.tolist(), strict=True):
            seen += range(first, min(first + CHUNK, ends[row]))
        assert seen == list(range(shape.tokens))


def _halved(inputs: Inputs) -> Inputs:
    """``inputs`` over a state of 16 bits."""
    parts = {k: x.bfloat16() if k == "state" else x.clone() for k, x in _view(inputs).parts.items()}
    return replace(_swap(inputs, parts=parts), written=(parts["state"][:, 1:],))


@pytest.mark.parametrize("name", ["step", "prefill"])
def test_states_may_be_kept_in_sixteen_bits(name: str, place: torch.device) -> None:
    if name == "prefill":
        op, fn = "gated_delta", gated_delta
        shape = RecurrentShape(lens=(70, 5, 9), stores=((1, 3),), captured=True)
        inputs = make_rule(shape, 3, place, torch.float32)
    else:
        op, fn = "gated_delta_step", gated_delta_step
        shape = RecurrentShape(lens=(1,) * 3, key_heads=2, heads=6, stores=((1, 1),))
        inputs = make_step(shape, 3, place, torch.float32)
    (out, state), (want, kept) = _run(fn, _halved(inputs)), _run(OPS[op].reference, _halved(inputs))
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(state, kept, atol=1e-2, rtol=1e-2, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [(70, 1, 129), (1100,) * 3, (1,) * 9])
def test_published_heads_keep_states_in_sixteen_bits(lens: tuple[int, ...], place: torch.device) -> None:
    is_step = len(lens) == 9
    op, fn = ("gated_delta_step", gated_delta_step) if is_step else ("gated_delta", gated_delta)
    shape = RecurrentShape(
        lens=lens, stores=((0, 1), (2, lens[2])), key_heads=2, heads=4, key_dim=128, value_dim=128
    )
    make = make_step if is_step else make_rule
    mine, theirs = (_halved(make(shape, 3, place, torch.bfloat16)) for _ in range(2))
    (out, state), (want, kept) = _run(fn, mine), _run(OPS[op].reference, theirs)
    allowed = OPS[op].tolerance(torch.bfloat16)
    torch.testing.assert_close(out, want, atol=allowed.atol, rtol=allowed.rtol)
    torch.testing.assert_close(state, kept, atol=3e-2, rtol=3e-2, equal_nan=True)


FAR = 2**31  # numbers that lie before those of any live slot


def _far(inputs: Inputs) -> Inputs:
    """``inputs`` over pools whose live slots lie beyond 32-bit offsets; what lies between is never touched."""
    view, parts = _view(inputs), {}
    shift = max(FAR // pool[0, 0].numel() + 1 for pool in view.parts.values())
    for name, pool in view.parts.items():
        try:
            whole = torch.empty(
                (shift + pool.shape[1], *pool.shape[2:]), dtype=pool.dtype, device=pool.device
            )
        except RuntimeError as error:
            pytest.skip(f"no room for a pool: {error}")
        whole[shift:] = pool[1]
        parts[name] = whole.expand(2, *whole.shape)

    def moved(slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots > 0, slots + shift, slots)

    stores = view.stores.clone()
    stores[:, 2] = moved(stores[:, 2])
    written = tuple(parts[name][:, shift + 1 :] for name in view.parts)
    return replace(_swap(inputs, parts=parts, slots_B=moved(view.slots_B), stores=stores), written=written)


@pytest.mark.skipif(sys.platform != "linux", reason="reserves memory that it does not use")
@pytest.mark.parametrize("name", ["causal_conv", "gated_delta", "step"])
def test_slots_beyond_32_bit_offsets_are_found(name: str, place: torch.device) -> None:
    shape = RecurrentShape(lens=(2, 1, 3), stores=((0, 1), (2, 3)))
    if name in PREFILL:
        fn, make = PREFILL[name]
    else:
        shape = RecurrentShape(lens=(1,) * 3, key_heads=2, heads=6, stores=((1, 1),))
        fn, make = gated_delta_step, make_step
    near, far = (make(shape, 3, place, torch.bfloat16) for _ in range(2))
    want, got = _run(fn, near), _run(fn, _far(far))
    assert torch.equal(got[0], want[0])
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert torch.equal(mine[1].nan_to_num(), theirs[1].nan_to_num())
