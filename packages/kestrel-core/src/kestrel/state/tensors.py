"""The device tensors behind each state, and the few copies that the cache itself makes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kestrel.ops import OpTable, copy_page, dtype_name
from kestrel.spi.backend import OpCall, OpQuery
from kestrel.spi.states import CrossKV, PagedKV, Recurrent, WindowKV

__all__ = ["CrossTensors", "PagedTensors", "RecurrentTensors", "torch_dtype"]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}


def torch_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """The torch dtype called ``name``; ``default`` for "auto". ValueError for a name that states cannot have."""
    if name == "auto":
        return default
    if name not in _DTYPES:
        raise ValueError(f"a state asks for dtype {name!r}; choices: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclass(frozen=True, slots=True)
class PagedTensors:
    """``k_LPKSD``, ``v_LPKSD``: [layers, pages, kv_heads, page_size, head_dim]; page 0 is scratch. Starts as zeros,
    so that masked positions hold finite numbers. ``window``: None for full attention. ``copy``: who serves the op
    copy_page."""

    k_LPKSD: torch.Tensor
    v_LPKSD: torch.Tensor
    window: int | None = None
    copy: OpCall = copy_page

    @classmethod
    def allocate(
        cls,
        spec: PagedKV | WindowKV,
        pages: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: OpTable | None = None,
    ) -> PagedTensors:
        """Zeroed tensors of ``pages`` usable pages and the scratch page. ``ops`` serve copies; None: the reference."""
        shape = (spec.layers, pages + 1, spec.kv_heads, page_size, spec.head_dim)
        kind = torch_dtype(spec.dtype, dtype)
        k, v = (torch.zeros(shape, dtype=kind, device=device) for _ in "kv")
        query = OpQuery.of(
            "copy_page", head_dim=spec.head_dim, kv_heads=spec.kv_heads, dtype=dtype_name(kind)
        )
        copy = copy_page if ops is None else ops.resolve(query)
        return cls(k, v, spec.window if isinstance(spec, WindowKV) else None, copy)

    def copy_page(self, src: int, dst: int, filled: int) -> None:
        """Copy the first ``filled`` positions of page ``src`` to page ``dst``, in stream order."""
        self.copy(self.k_LPKSD, self.v_LPKSD, src, dst, filled)


@dataclass(frozen=True, slots=True)
class RecurrentTensors:
    """``parts``: name to [layers, slots, *shape]; slot 0 is scratch. Live slots and checkpoints share the slots."""

    parts: Mapping[str, torch.Tensor]

    @classmethod
    def allocate(
        cls, spec: Recurrent, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> RecurrentTensors:
        """Zeroed tensors of ``slots`` usable slots and the scratch slot."""
        return cls(
            {
                part.name: torch.zeros(
                    (spec.layers, slots + 1, *part.shape), dtype=torch_dtype(part.dtype, dtype), device=device
                )
                for part in spec.parts
            }
        )

    def zero(self, slot: int) -> None:
        """Make ``slot`` the state of an empty sequence, in stream order."""
        for x in self.parts.values():
            torch._foreach_zero_(x[:, slot].unbind())  # one launch for all layers, however large the pool

    def copy(self, src: int, dst: int) -> None:
        """Copy slot ``src`` to slot ``dst``, in stream order."""
        for x in self.parts.values():
            torch._foreach_copy_(x[:, dst].unbind(), x[:, src].unbind())


@dataclass(frozen=True, slots=True)
class CrossTensors:
    """``k_LEKSD``, ``v_LEKSD``: [layers, entries, kv_heads, max_len, head_dim]; entry 0 is scratch."""

    k_LEKSD: torch.Tensor
    v_LEKSD: torch.Tensor

    @classmethod
    def allocate(
        cls, spec: CrossKV, entries: int, *, dtype: torch.dtype, device: torch.device
    ) -> CrossTensors:
        """Zeroed tensors of ``entries`` usable entries and the scratch entry."""
        shape: Sequence[int] = (spec.layers, entries + 1, spec.kv_heads, spec.max_len, spec.head_dim)
        kind = torch_dtype(spec.dtype, dtype)
        return cls(*(torch.zeros(shape, dtype=kind, device=device) for _ in "kv"))
