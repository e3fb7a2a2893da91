"""decode_attention: norm, rope, the write of the newest key and value, and attention over them, in one launch.

Letters: B rows, H query heads, K key/value heads, D head dim, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kestrel.spi import Impl, OpQuery
from kestrel.spi.batch import PagedView
from kestrel_kernels_cuda import attention_paged
from kestrel_kernels_cuda.attention_configs import Split, arch_of, supports_heads
from kestrel_kernels_cuda.attention_decode import Fresh
from kestrel_kernels_cuda.attention_warm import DECODES, META, any_limits, cases_of
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.kv_write import qk_norm_rope_kv_write
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of

__all__ = ["IMPLS", "compile_cases", "decode_attention"]


def decode_attention(
    q_BHD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    view: PagedView,
    layer: int,
    scale: float,
    cos_BR: torch.Tensor | None = None,
    sin_BR: torch.Tensor | None = None,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    softcap: float | None = None,
    gate_BHD: torch.Tensor | None = None,
    *,
    add_one: bool = False,
) -> torch.Tensor:
    """As ``kestrel.ops.decode_attention``: outputs [B, H, D]. Deterministic launches take the parts one by one."""
    if view.limits.is_deterministic:
        prepared = qk_norm_rope_kv_write(
            q_BHD, k_BKD, v_BKD, view, layer, cos_BR, sin_BR, q_weight_D, k_weight_D, eps,
            add_one=add_one, gives_keys=True,
        )  # fmt: skip
        return attention_paged.paged_attention(prepared[0], view, layer, scale, softcap, gate_BHD)
    fresh = Fresh(
        k_BKD=k_BKD, v_BKD=v_BKD, slots_B=view.slots_T, cos_BR=cos_BR, sin_BR=sin_BR,
        q_weight_D=q_weight_D, k_weight_D=k_weight_D, eps=eps, add_one=add_one,
    )  # fmt: skip
    arch = arch_of(q_BHD.device)
    out, launches = attention_paged.decode(q_BHD, view, layer, scale, softcap, gate_BHD, arch, fresh=fresh)
    for launch in launches:
        launch.run()
    return out


def _planned(query: OpQuery, arch: int, rows: int, split: Split, longest: int = 4096) -> list[Launch]:
    """The launches of ``query`` without memory, of one projection of q, k and v."""
    heads, kv_heads, dim = query.get("heads"), query.get("kv_heads"), query.get("head_dim")
    packed = torch.empty((rows, heads + 2 * kv_heads, dim), dtype=dtype_of(query), device=META)
    q, k, v = packed.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    norm, turned = query.get("norm"), query.get("rot_dim")
    weight = torch.empty(dim, dtype=dtype_of(query), device=META) if norm else None
    angle = torch.empty((rows, turned), dtype=torch.float32, device=META) if turned else None
    view = attention_paged.meta_view(query, any_limits(rows, rows, 1, longest))
    fresh = Fresh(
        k_BKD=k, v_BKD=v, slots_B=view.slots_T, cos_BR=angle, sin_BR=angle,
        q_weight_D=weight, k_weight_D=weight, eps=1e-6, add_one=norm == "rms_plus_one",
    )  # fmt: skip
    gate = attention_paged.meta_gate(query, rows)
    softcap = 1.0 if query.get("softcap") else None
    return attention_paged.decode(q, view, 0, 1.0, softcap, gate, arch, split, fresh)[1]


def _warm_launches(query: OpQuery, arch: int) -> Iterator[Launch]:
    for rows, wanted, splits, longest in DECODES:
        yield from _planned(query, arch, rows, Split(wanted, 64, splits), longest)


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(_warm_launches(query, arch_of(META)))


_SHAPES = {  # of models: heads, key/value heads, head dim, rotated, norm, gated, window, softcap
    "moondream": (32, 32, 64, 32, None, False, None, False),
    "qwen": (16, 4, 256, 64, "rms_plus_one", True, None, False),
    "whisper": (20, 20, 64, 0, None, False, None, False),
    "gemma": (16, 8, 256, 256, "rms", False, 1024, True),
    "gemma full": (16, 1, 512, 128, "rms", False, None, False),
}


def compile_cases() -> Iterator[CompileCase]:
    """Models' heads in bfloat16."""
    for name, (heads, kv_heads, dim, rotated, norm, gated, window, softcap) in _SHAPES.items():
        query = OpQuery.of(
            "decode_attention", heads=heads, kv_heads=kv_heads, head_dim=dim, page=16, rot_dim=rotated,
            norm=norm, gated=gated, window=window, softcap=softcap, dtype="bfloat16",
        )  # fmt: skip
        for arch in (80, 90) if name in ("moondream", "qwen") else (90,):
            yield from cases_of(f"decode_attention {name}", _warm_launches(query, arch), (arch,))
        if name in ("moondream", "qwen"):
            kept = OpQuery.of(query.op, **dict(query.facts), **attention_paged.EIGHT)
            yield from cases_of(f"decode_attention {name} 8 bits", _warm_launches(kept, 90), (90,))


IMPLS = {"decode_attention": Impl(supports=supports_heads, fn=decode_attention, warm=_warm)}
