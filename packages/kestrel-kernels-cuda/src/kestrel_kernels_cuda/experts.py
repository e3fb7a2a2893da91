"""grouped_experts: a few pairs of token and expert as vectors, many as a grouped product over sorted rows.

Letters: T tokens, K experts of one token, P = T · K pairs, E experts, C hidden, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.experts_kernels import (
    down_kernel,
    gemv_down_kernel,
    gemv_up_kernel,
    sum_kernel,
    up_kernel,
)
from kestrel_kernels_cuda.experts_sort import sort_launches
from kestrel_kernels_cuda.launch import (
    Launch,
    compile_case_of,
    distinct,
    dtype_of,
    jobs_of,
    power_of_two,
    refuse_dtype,
)
from kestrel_kernels_cuda.overlap import overlap

__all__ = ["IMPLS", "Call", "Tiling", "Tilings", "call_of", "compile_cases", "grouped_experts", "meta_call"]

FEW_PAIRS = 64  # up to here most experts are named once: sorting would cost more than it shares
SUM_BLOCK = 1024
GEMV_K = 2048  # inputs that a program reads at a time: a row of weights in one piece, to have many bytes on their way
UP_TILE, DOWN_TILE = 4096, 2048  # weights that a program of each product reads at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Blocks of one grouped product: rows, outputs, inputs; tiles that go together; warps and stages."""

    m: int
    n: int
    k: int
    group: int
    num_warps: int
    num_stages: int

    def meta(self) -> dict[str, int]:
        """As a launch takes it."""
        return {
            "BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP": self.group,
            "num_warps": self.num_warps, "num_stages": self.num_stages,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tilings:
    """The two products up to ``pairs_each`` pairs per expert on average."""

    pairs_each: float
    up: Tiling
    down: Tiling


# by the mean number of pairs of an expert: reading weights dominates at first, then arithmetic. Both products of an
# entry have the same rows, for they share the tiles
TABLE = (
    Tilings(
        pairs_each=8,
        up=Tiling(m=16, n=32, k=128, group=1, num_warps=4, num_stages=4),
        down=Tiling(m=16, n=64, k=128, group=1, num_warps=4, num_stages=4),
    ),
    Tilings(
        pairs_each=48,
        up=Tiling(m=64, n=64, k=64, group=4, num_warps=4, num_stages=3),
        down=Tiling(m=64, n=128, k=64, group=4, num_warps=4, num_stages=3),
    ),
    Tilings(
        pairs_each=float("inf"),
        up=Tiling(m=128, n=64, k=64, group=8, num_warps=8, num_stages=3),
        down=Tiling(m=128, n=128, k=64, group=8, num_warps=8, num_stages=3),
    ),
)
FLOAT32 = Tilings(  # no matrix unit computes it exactly
    pairs_each=float("inf"),
    up=Tiling(m=16, n=16, k=32, group=4, num_warps=4, num_stages=2),
    down=Tiling(m=16, n=32, k=32, group=4, num_warps=4, num_stages=2),
)


def tilings_of(pairs: int, experts: int, dtype: torch.dtype) -> Tilings:
    """The configuration of a launch with ``pairs`` pairs."""
    if dtype == torch.float32:
        return FLOAT32
    return next(entry for entry in TABLE if pairs <= entry.pairs_each * experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments of one call, with contiguous pairs, and the output."""

    x_TC: torch.Tensor
    weights_P: torch.Tensor
    experts_P: torch.Tensor
    gate_up_EIC: torch.Tensor
    down_ECI: torch.Tensor
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    gelu: bool
    top_k: int
    out_TC: torch.Tensor

    def empty(self, width: int) -> torch.Tensor:
        """Room for one row per pair."""
        shape = (self.experts_P.shape[0], width)
        return torch.empty(shape, dtype=self.x_TC.dtype, device=self.x_TC.device)

    def run(self) -> torch.Tensor:
        """The output, once its launches are under way."""
        if self.out_TC.shape[0]:
            for launch in self.launches():
                launch.run()
        return self.out_TC

    def launches(self) -> list[Launch]:
        """In the order of running."""
        if self.experts_P.shape[0] <= FEW_PAIRS:
            return self._few()
        return self._many()

    def _few(self) -> list[Launch]:
        _, dim, width = self.down_ECI.shape
        hidden = self.empty(width)
        shape = {"TOP_K": self.top_k, "DIM": dim, "WIDTH": width, "num_warps": 4, **overlap(hidden.device)}
        up, down = _gemv_blocks(dim, UP_TILE), _gemv_blocks(width, DOWN_TILE)
        return [
            Launch(
                gemv_up_kernel,
                (hidden.shape[0], triton.cdiv(width, up["BLOCK_N"])),
                (
                    self.x_TC, self.experts_P, self.gate_up_EIC, self.scales[0], hidden, self.x_TC.stride(0),
                    *self.gate_up_EIC.stride()[:2],
                ),
                {**shape, **up, "GELU": self.gelu},
            ),
            Launch(
                gemv_down_kernel,
                (self.out_TC.shape[0], triton.cdiv(dim, down["BLOCK_N"])),
                (
                    hidden, self.experts_P, self.weights_P, self.down_ECI, self.scales[1], self.out_TC,
                    *self.down_ECI.stride()[:2],
                ),
                {**shape, **down},
            ),
        ]  # fmt: skip

    def _many(self) -> list[Launch]:
        experts, dim, width = self.down_ECI.shape
        tilings = tilings_of(self.experts_P.shape[0], experts, self.x_TC.dtype)
        sorting, order = sort_launches(self.experts_P, experts, tilings.up.m)
        tiles = order.tile_expert_M.shape[0]
        place = (order.order_P, order.tile_expert_M, order.tile_row_M, order.tile_end_M, tiles)
        hidden, made = self.empty(width), self.empty(dim)
        shape = {"DIM": dim, "WIDTH": width, **overlap(hidden.device)}
        strides = self.gate_up_EIC.stride()[:2]
        sums = {"TOP_K": self.top_k, "DIM": dim, "BLOCK": SUM_BLOCK, "num_warps": 4, **overlap(hidden.device)}
        return [
            *sorting,
            Launch(
                up_kernel,
                (tiles * triton.cdiv(width, tilings.up.n),),
                (self.x_TC, self.gate_up_EIC, self.scales[0], hidden, *place, self.x_TC.stride(0), *strides),
                {**shape, "TOP_K": self.top_k, "GELU": self.gelu, **tilings.up.meta()},
            ),
            Launch(
                down_kernel,
                (tiles * triton.cdiv(dim, tilings.down.n),),
                (hidden, self.down_ECI, self.scales[1], made, *place, *self.down_ECI.stride()[:2]),
                {**shape, **tilings.down.meta()},
            ),
            Launch(
                sum_kernel,
                (self.out_TC.shape[0], triton.cdiv(dim, SUM_BLOCK)),
                (made, self.weights_P, self.out_TC),
                sums,
            ),
        ]


def _gemv_blocks(inputs: int, tile: int) -> dict[str, int]:
    block = min(GEMV_K, power_of_two(inputs))
    return {"BLOCK_K": block, "BLOCK_N": max(1, min(8, tile // block))}


def call_of(
    x_TC: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EIC: torch.Tensor,
    down_ECI: torch.Tensor,
    activation: str,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Call:
    """A call, with what has to be contiguous made so. ``scales``: of 8-bit weights, as ``ops.fp8_grouped_experts``."""
    assert gate_up_EIC.stride(2) == down_ECI.stride(2) == 1, "an expert's inputs are not adjacent"
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    return Call(
        x_TC=x_TC,
        weights_P=weights_TK.contiguous(),
        experts_P=experts_TK.contiguous().view(-1),
        gate_up_EIC=gate_up_EIC,
        down_ECI=down_ECI,
        scales=scales,
        gelu=activation == "gelu_tanh_mul",
        top_k=experts_TK.shape[1],
        out_TC=torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device),
    )


def grouped_experts(
    x_TC: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EIC: torch.Tensor,
    down_ECI: torch.Tensor,
    activation: str = "silu_mul",
) -> torch.Tensor:
    """As ``kestrel.ops.grouped_experts``."""
    call = call_of(x_TC, weights_TK, experts_TK, gate_up_EIC, down_ECI, activation)
    return call.run()


def supports(query: OpQuery) -> Yes | No:
    """Yes to both activations."""
    if refused := refuse_dtype(query):
        return refused
    if query.get("activation") not in ("silu_mul", "gelu_tanh_mul"):
        return No(f"has no activation {query.get('activation')!r}")
    return Yes()


def meta_call(query: OpQuery, rows: int, *, scaled: bool = False) -> Call:
    """A call of ``rows`` tokens that take no memory."""
    experts, dim, width = query.get("experts"), query.get("hidden"), query.get("width")
    own = dtype_of(query)

    def empty(*shape: int, dtype: torch.dtype = own) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weights = torch.float8_e4m3fn if scaled else own
    scale = empty(1, dtype=torch.float32) if scaled else None
    return call_of(
        empty(rows, dim), empty(rows, query.get("top_k")), empty(rows, query.get("top_k"), dtype=torch.int64),
        empty(experts, 2 * width, dim, dtype=weights), empty(experts, dim, width, dtype=weights),
        query.get("activation"), (scale, scale),
    )  # fmt: skip


def warm(
    query: OpQuery, row_counts: Sequence[int], *, scaled: bool = False
) -> Iterable[Callable[[], object]]:
    """The launches of each configuration that ``row_counts`` lead to."""
    kinds: dict[Tilings | None, int] = {}
    for rows in row_counts:
        pairs = rows * query.get("top_k")
        few = pairs <= FEW_PAIRS
        kinds[None if few else tilings_of(pairs, query.get("experts"), dtype_of(query))] = rows
    return jobs_of(
        launch for rows in kinds.values() for launch in meta_call(query, rows, scaled=scaled).launches()
    )


IMPLS: Mapping[str, Impl] = {"grouped_experts": Impl(supports=supports, fn=grouped_experts, warm=warm)}

QWEN = OpQuery.of(
    "grouped_experts",
    hidden=2048, experts=256, top_k=8, width=512, activation="silu_mul", dtype="bfloat16",
)  # fmt: skip


def compile_cases() -> Iterator[CompileCase]:
    """Every launch at Qwen3.5-35B-A3B's sizes: a step of 1 row, of 64, and prompts of 1024 and 16384 tokens."""
    launches = [launch for rows in (1, 64, 1024, 16384) for launch in meta_call(QWEN, rows).launches()]
    for launch in distinct(launches):
        yield compile_case_of(f"experts {launch.kernel.__name__}", launch)
