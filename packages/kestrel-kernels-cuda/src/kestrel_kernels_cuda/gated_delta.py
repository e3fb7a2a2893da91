"""gated_delta: the rule over ragged sequences: each chunk alone, then over the chunks of a sequence, then checkpoints.

Letters: B sequences, T tokens, K key heads, H value heads, D key dim, E value dim, N chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.devices import arch_of, family_of
from kestrel_kernels_cuda.gated_delta_chunks import solve_kernel
from kestrel_kernels_cuda.gated_delta_scan import scan_kernel, store_kernel
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, jobs_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.recurrent_plan import CHUNK, Plan, meta_view, plan_of
from kestrel_kernels_cuda.wide_states import float32_states

__all__ = ["IMPLS", "compile_cases", "delta_launches", "gated_delta"]

LARGEST_KEY, LARGEST_VALUE = 128, 256

Configs = tuple[Mapping[str, int] | None, Mapping[str, int] | None, Mapping[str, int] | None]

FEW = 1024  # tokens up to which a launch is taken for one of few sequences, unless its limits say otherwise
FEW_STATES = 64  # one a head and sequence: an H200 has multiprocessors for halves of so many


def is_few(tokens: int, heads: int, longest: int) -> bool:
    """Whether a launch may be of states so few that halves of them run side by side. ``longest``: its ceiling."""
    return tokens <= FEW and heads * max(1, tokens // max(1, longest)) <= FEW_STATES


def configs_for(arch: int, head: tuple[int, int], few: bool, dtype: torch.dtype) -> Configs:
    """Configurations of ``solve_kernel``, ``scan_kernel`` and ``store_kernel`` for heads of key dim x value dim. On
    sm_90 a product takes 64 rows per four warps, here columns of a state, whether a head has them or not; and with
    168 registers a multiprocessor solves three chunks at a time."""
    solve = {"PIECE": 64, "num_warps": 8, "num_stages": 1}
    if family_of(arch) != "sm_90" or dtype.itemsize > 2:
        block = {"BLOCK_E": 32, "num_warps": 8}
        return solve, block | {"STAGES": 2 if dtype.itemsize == 2 else 1}, block
    if min(head) >= 64:
        solve = {"PIECE": LARGEST_KEY, "num_warps": 4, "num_stages": 1, "maxnreg": 168}
    block = {"BLOCK_E": 64, "num_warps": 4}
    if few or head[1] <= 64:
        return solve, block | {"STAGES": 3}, block
    return solve, {"BLOCK_E": 128, "num_warps": 8, "STAGES": 3}, block


def delta_launches(
    q_TKD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_THE: torch.Tensor,
    gate_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    view: RecurrentView,
    layer: int,
    part: str = "state",
    configs: Configs = (None, None, None),
) -> tuple[Launch, Launch, Launch, torch.Tensor]:
    """The launches, in order, and their output [T, H, E]; the last is empty without checkpoints. ``configs``: used
    instead of the committed ones."""
    (tokens, _, key_dim), (heads, value_dim) = q_TKD.shape, v_THE.shape[1:]
    pool_SHDE = view.parts[part][layer]
    assert pool_SHDE.is_contiguous(), "a layer's slots lie side by side"
    assert pool_SHDE.dtype == torch.float32, (
        "ptxas 12.8 miscompiles the kernels over narrow states, see ``assembly``"
    )
    few = is_few(tokens, heads, view.limits.max_query_len)
    committed = configs_for(arch_of(v_THE.device), (key_dim, value_dim), few, v_THE.dtype)
    solve, scan, store = (mine or usual for mine, usual in zip(configs, committed, strict=True))

    def empty(*shape: int, dtype: torch.dtype = v_THE.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=v_THE.device)

    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q_TKD, k_TKD, v_THE))
    gate, beta = (x if x.stride(1) == 1 else x.contiguous() for x in (gate_TH, beta_TH))
    n, p = empty(tokens, heads, CHUNK), empty(tokens, heads, CHUNK)
    factors, scales = (empty(size, heads, tokens, dtype=torch.float32) for size in (2, 4))
    call = _Call(
        q=q, k=k, v=v, gate=gate, beta=beta, n=n, p=p, factors=factors, scales=scales,
        out=empty(tokens, heads, value_dim), pool=pool_SHDE, view=view,
    )  # fmt: skip
    plan = plan_of(view, layer, tokens)
    return call.solve(solve, plan), call.scan(scan), call.store(store), call.out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The tensors of one call, for its launches: inputs, what ``solve_kernel`` leaves (as there), output and state."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    n: torch.Tensor
    p: torch.Tensor
    factors: torch.Tensor
    scales: torch.Tensor
    out: torch.Tensor
    pool: torch.Tensor
    view: RecurrentView

    def solve(self, config: Mapping[str, int], plan: Plan) -> Launch:
        """Every chunk alone."""
        (tokens, _, key_dim), (heads, value_dim) = self.q.shape, self.v.shape[1:]
        meta = {**self._sizes, "BLOCK_E": max(16, power_of_two(value_dim)), **config}
        return Launch(
            solve_kernel,
            (heads, plan.num_chunks * bool(tokens)),
            (
                self.q, self.k, self.gate, self.beta, self.view.cu_seqlens, plan.row_N, plan.first_N, self.n, self.p,
                self.factors, self.scales, self.out, self._rows, tokens, self.q.stride(0), self.k.stride(0),
                self.gate.stride(0), self.beta.stride(0), key_dim**-0.5,
            ),
            {**meta, "PIECE": min(config["PIECE"], meta["BLOCK_D"])},
        )  # fmt: skip

    def scan(self, config: Mapping[str, int]) -> Launch:
        """Chunk after chunk of each sequence."""
        stores = self.view.stores
        strides = {"Q_STRIDE": self.q.stride(0), "K_STRIDE": self.k.stride(0), "V_STRIDE": self.v.stride(0)}
        return Launch(
            scan_kernel,
            self._grid(config, self._rows),
            (
                self.q, self.k, self.v, self.n, self.p, self.factors, self.scales, self.pool, self.view.slots_B,
                self.view.cu_seqlens, stores, self.out, len(self.q), len(stores),
            ),
            {**self._sizes, "HAS_STORES": len(stores) > 0, **strides, **config},
        )  # fmt: skip

    def store(self, config: Mapping[str, int]) -> Launch:
        """Checkpoints, to their tokens."""
        stores = self.view.stores
        return Launch(
            store_kernel,
            self._grid(config, len(stores)),
            (
                self.k, self.v, self.n, self.factors, self.scales, self.pool, self.view.cu_seqlens, stores,
                len(self.q), self.k.stride(0), self.v.stride(0),
            ),
            {**self._sizes, **config},
        )  # fmt: skip

    @property
    def _rows(self) -> int:
        return self.view.slots_B.shape[0]

    def _grid(self, config: Mapping[str, int], last: int) -> tuple[int, int, int]:
        """Blocks of a state's columns, heads, and ``last``; nothing without tokens."""
        tokens, heads, value_dim = self.v.shape
        return triton.cdiv(value_dim, config["BLOCK_E"]), heads, last * bool(tokens)

    @property
    def _sizes(self) -> dict[str, Any]:
        """Constants of all three kernels."""
        (_, key_heads, key_dim), (heads, value_dim) = self.q.shape, self.v.shape[1:]
        return {
            "KEY_HEADS": key_heads, "HEADS": heads, "D": key_dim, "E": value_dim, "CHUNK": CHUNK,
            "BLOCK_D": max(16, power_of_two(key_dim)),
            "PRECISION": "tf32x3" if self.v.dtype == torch.float32 else "tf32",
        }  # fmt: skip


def gated_delta(
    q_TKD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_THE: torch.Tensor,
    gate_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    view: RecurrentView,
    layer: int,
    part: str = "state",
) -> torch.Tensor:
    """As ``kestrel.ops.gated_delta``."""
    if view.parts[part].dtype != torch.float32:
        plan_of(view, layer, v_THE.shape[0])  # for the layers behind this one too
        with float32_states(view, layer, part) as wide:
            return gated_delta(q_TKD, k_TKD, v_THE, gate_TH, beta_TH, wide, layer, part)
    *launches, out_THE = delta_launches(q_TKD, k_TKD, v_THE, gate_TH, beta_TH, view, layer, part)
    for launch in launches:
        launch.run()
    return out_THE


def supports(query: OpQuery) -> Yes | No:
    """Yes to launches of several tokens a sequence, for heads up to the published size."""
    if refused := refuse_dtype(query):
        return refused
    if query.get("mode") != "prefill":
        return No("solves chunks of several tokens; gated_delta_step serves decode")
    key_heads, heads = query.get("key_heads", 1), query.get("heads", 1)
    if heads % key_heads:
        return No(f"deals whole groups of value heads to key heads, not {heads} to {key_heads}")
    if query.get("key_dim", 0) > LARGEST_KEY or query.get("value_dim", 0) > LARGEST_VALUE:
        return No(
            f"holds heads of up to {LARGEST_KEY} x {LARGEST_VALUE}, not "
            f"{query.get('key_dim')} x {query.get('value_dim')}"
        )
    return Yes()


def _bare_launches(
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    stores: int,
    tokens: int,
    arch: int | None = None,
) -> tuple[Launch, Launch, Launch]:
    """Launches without memory, with ``stores`` checkpoints, as ``arch`` (None: this device's) has them. They do not
    depend on sequences."""
    keys, values = key_heads * key_dim, heads * value_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # The convolved projections are parts of one tensor [q | k | v].
    q, k, v = empty(tokens, 2 * keys + values).split_with_sizes([keys, keys, values], dim=1)
    q, k, v = q.unflatten(1, (key_heads, -1)), k.unflatten(1, (key_heads, -1)), v.unflatten(1, (heads, -1))
    gates = empty(tokens, heads, dtype=torch.float32)
    pool = empty(1, 2, heads, key_dim, value_dim, dtype=torch.float32)
    configs = (
        (None,) * 3
        if arch is None
        else configs_for(arch, (key_dim, value_dim), is_few(tokens, heads, tokens), dtype)
    )
    view = meta_view({"state": pool}, 1, tokens, stores)
    return delta_launches(q, k, v, gates, gates, view, 0, configs=configs)[:3]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """Each kernel, for few tokens and for many, with checkpoints and without."""
    names = ("key_heads", "heads", "key_dim", "value_dim")
    key_heads, heads, key_dim, value_dim = (query.get(name) for name in names)
    launches = [
        launch
        for stores in (0, 2)
        for tokens in (FEW, 2 * FEW)
        for launch in _bare_launches(key_heads, heads, key_dim, value_dim, dtype_of(query), stores, tokens)
    ]
    return jobs_of(launches)


IMPLS: Mapping[str, Impl] = {"gated_delta": Impl(supports=supports, fn=gated_delta, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The published head, for few tokens and for many, with checkpoints and without.

    On sm_90 ``scan_kernel`` with three stages needs more registers than there are: a few addresses and masks go to the
    stack before its loop, which reads eight of them a chunk (of 960 instructions) for few tokens, and none for many.
    Two stages, which are slower, spill as well.
    """
    stacks = {FEW: 64, 2 * FEW: 16}
    for arch in (80, 90):
        for tokens in (FEW, 2 * FEW):
            for stores in (0, 2):
                launches = _bare_launches(16, 32, 128, 128, torch.bfloat16, stores, tokens, arch)
                for launch in launches if stores else launches[:2]:
                    label = f"{launch.kernel.__name__}, {tokens} tokens, {stores} checkpoints"
                    case = compile_case_of(f"gated_delta {label}, sm_{arch}", launch, (arch,))
                    spills = launch.kernel is scan_kernel and arch == 90
                    yield replace(case, stack=stacks[tokens] if spills else 0)
