"""Attention over paged state, and inside an encoder. Projections belong to the model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from kestrel.layers.norms import NormKind
from kestrel.layers.rope import Angles
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpQuery
from kestrel.spi.batch import Batch, CrossView
from kestrel.spi.family import OpTableLike

__all__ = ["CrossAttention", "PagedAttention", "VisionAttention"]


class PagedAttention(nn.Module):
    """Writes this launch's keys and values to state ``state``, then attends. Holds no weights.

    ``layer`` counts within the state. ``scale`` None is head_dim ^ −0.5. ``window`` must be the state's. ``rot_dim``
    above 0 and ``qk_norm`` ("rms", "rms_plus_one") move rope and the per-head norm of q and k into the same op as
    the write: ``forward`` then takes the angles and the two norm weights. ``gated``: it takes a gate for its output.
    """

    def __init__(
        self,
        ops: OpTableLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        state: str,
        layer: int,
        scale: float | None = None,
        window: int | None = None,
        *,
        softcap: float | None = None,
        rot_dim: int = 0,
        qk_norm: NormKind | None = None,
        eps: float = 1e-6,
        gated: bool = False,
        page_size: int = 16,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.state, self.layer, self.softcap, self.eps = state, layer, softcap, eps
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rot_dim, self.qk_norm = rot_dim, qk_norm
        self.gated = gated
        pages = _page_facts(ops, kv_heads, head_dim, page_size, dtype)
        given = {"softcap": softcap is not None, "gated": gated}
        shape = {**pages, "heads": heads, "window": window, **given}
        self._prefill = ops.resolve(OpQuery.of("paged_attention", mode="prefill", fresh=True, **shape))
        self._decode = partial(
            ops.resolve, OpQuery.of("paged_attention", mode="decode", fresh=False, **shape)
        )
        self._step = ops.find(OpQuery.of("decode_attention", rot_dim=rot_dim, norm=qk_norm, **shape))
        if self._step is None:
            self._decode()
        self._fused = bool(rot_dim) or qk_norm is not None
        if self._fused:
            query = OpQuery.of("qk_norm_rope_kv_write", heads=heads, rot_dim=rot_dim, norm=qk_norm, **pages)
            self._write = ops.resolve(query)
        else:
            self._write = ops.resolve(OpQuery.of("write_kv", **pages))

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor | None,
        v_TKD: torch.Tensor | None,
        batch: Batch,
        angles: Angles | None = None,
        q_weight_D: torch.Tensor | None = None,
        k_weight_D: torch.Tensor | None = None,
        gate_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs [T, H, D]. Without keys and values it reads what an earlier layer wrote (shared state)."""
        view = batch.paged(self.state)
        gate_THD = gate_THD if self.gated else None
        out: torch.Tensor
        if k_TKD is not None and v_TKD is not None:
            cos, sin = (None, None) if angles is None else angles
            norm, add_one = (q_weight_D, k_weight_D, self.eps), self.qk_norm == "rms_plus_one"
            if self._step is not None and view.limits.is_decode:
                out = self._step(
                    q_THD, k_TKD, v_TKD, view, self.layer, self.scale, cos, sin, *norm, self.softcap, gate_THD,
                    add_one=add_one,
                )  # fmt: skip
                return out
            if self._fused:
                q_THD, k_TKD = self._write(
                    q_THD, k_TKD, v_TKD, view, self.layer, cos, sin, *norm, add_one=add_one, gives_keys=True
                )
            else:
                self._write(k_TKD, v_TKD, view, self.layer)
        about = (view, self.layer, self.scale, self.softcap, gate_THD)
        if view.limits.is_decode:
            out = self._decode()(q_THD, *about)
        else:
            out = self._prefill(q_THD, *about, k_TKD, v_TKD)
        return out


def _page_facts(
    ops: OpTableLike, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype | None
) -> dict[str, int | str | None]:
    """What every query of an op that touches pages says of them."""
    return {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page": page_size,
        "dtype": dtype_name(dtype or torch.get_default_dtype()),
        "kv_dtype": None if ops.kv_dtype == "auto" else ops.kv_dtype,
    }


class CrossAttention(nn.Module):
    """Attention to the encoded media item of each sequence, in cross state ``state``. Holds no weights.

    ``layer`` counts within the state, ``max_len`` is the state's.
    """

    def __init__(
        self,
        ops: OpTableLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        state: str,
        layer: int,
        max_len: int,
        scale: float | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.state, self.layer = state, layer
        self.scale = head_dim**-0.5 if scale is None else scale
        name = dtype_name(dtype or torch.get_default_dtype())
        shape = {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_len": max_len,
            "dtype": name,
        }
        self._decode = ops.resolve(OpQuery.of("cross_attention", mode="decode", **shape))
        self._prefill = ops.resolve(OpQuery.of("cross_attention", mode="prefill", **shape))
        del shape["heads"]
        self._write = ops.resolve(OpQuery.of("write_cross", **shape))

    def forward(self, q_THD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Outputs [T, H, D]."""
        view = batch.cross(self.state)
        attend = self._decode if view.limits.is_decode else self._prefill
        out: torch.Tensor = attend(q_THD, view, self.layer, self.scale)
        return out

    def write(
        self, k_NKD: torch.Tensor, v_NKD: torch.Tensor, lengths: Sequence[int], views: Mapping[str, CrossView]
    ) -> None:
        """Store projected encoder rows in new entries: the next ``lengths[b]`` rows are item b's (``write_cross``)."""
        self._write(k_NKD, v_NKD, lengths, views[self.state], self.layer)


class VisionAttention(nn.Module):
    """Dense attention inside each item of a batch. Holds no weights."""

    def __init__(
        self,
        ops: OpTableLike,
        heads: int,
        head_dim: int,
        scale: float | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale
        name = dtype_name(dtype or torch.get_default_dtype())
        self._call = ops.resolve(OpQuery.of("vision_attention", heads=heads, head_dim=head_dim, dtype=name))

    def forward(self, q_NSHD: torch.Tensor, k_NSHD: torch.Tensor, v_NSHD: torch.Tensor) -> torch.Tensor:
        """Outputs [N, S, H, D]."""
        out: torch.Tensor = self._call(q_NSHD, k_NSHD, v_NSHD, self.scale)
        return out
