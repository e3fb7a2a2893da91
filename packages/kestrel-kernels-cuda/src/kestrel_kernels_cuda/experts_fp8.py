"""fp8_grouped_experts: the launches of grouped_experts on 8-bit weights, each product times the scale of its block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda import experts
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.experts import QWEN, call_of, meta_call
from kestrel_kernels_cuda.launch import compile_case_of, refuse_e4m3

__all__ = ["IMPLS", "compile_cases", "fp8_grouped_experts"]

ROWS = 8  # of a weight that one program reads for a few pairs, all in one block


def fp8_grouped_experts(
    x_TC: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EIC: torch.Tensor,
    gate_up_scale_ERS: torch.Tensor,
    down_ECI: torch.Tensor,
    down_scale_ERS: torch.Tensor,
    activation: str = "silu_mul",
) -> torch.Tensor:
    """As ``kestrel.ops.fp8_grouped_experts``."""
    scales = gate_up_scale_ERS.contiguous(), down_scale_ERS.contiguous()
    return call_of(x_TC, weights_TK, experts_TK, gate_up_EIC, down_ECI, activation, scales).run()


def supports(query: OpQuery) -> Yes | No:
    """Yes where 8-bit floats can be read, and the gate's rows end where a program's do."""
    if refused := refuse_e4m3():
        return refused
    if query.get("width", 0) % ROWS:
        return No(f"an expert's width of {query.get('width')} is no multiple of {ROWS}")
    return experts.supports(query)


IMPLS: Mapping[str, Impl] = {
    "fp8_grouped_experts": Impl(
        supports=supports, fn=fp8_grouped_experts, warm=partial(experts.warm, scaled=True)
    )
}


def compile_cases() -> Iterator[CompileCase]:
    """The products of a step of 1 row, of 64, and of a long prompt."""
    for rows in (1, 64, 16384):
        for launch in meta_call(QWEN, rows, scaled=True).launches():
            if "WIDTH" in launch.meta:
                case = compile_case_of(f"experts {launch.kernel.__name__}, 8 bits", launch)
                yield replace(case, archs=(90,))
