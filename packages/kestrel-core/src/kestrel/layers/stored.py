"""Modules that say how their weights are stored: named parts of one tensor, and layouts that providers want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["PackedPart", "Stored", "pack_weights", "packed_parts"]


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows ``start`` to ``end`` of parameter ``target``: where a checkpoint's tensor goes."""

    target: str
    start: int
    end: int


class Stored(nn.Module):
    """A module whose weights may come in parts, or be laid out for a provider."""

    def stored_parts(self) -> Mapping[str, PackedPart]:
        """Names, inside this module, that a checkpoint may use for parts of its parameters."""
        return {}

    def pack(self) -> None:
        """Lay the weights out as their providers want them; ``pack_weights`` calls this once, after loading."""


def pack_weights(module: nn.Module) -> None:
    """Lay out the weights of every layer inside ``module`` for its providers. Once, when the weights are loaded."""
    for child in module.modules():
        if isinstance(child, Stored):
            child.pack()


def packed_parts(module: nn.Module) -> dict[str, PackedPart]:
    """Every tensor name that a checkpoint may use for a part of a weight inside ``module``, and where it goes.

    For a ``Packed`` module ``attn.qkv`` with a part ``q``: "attn.qkv.q.weight" is rows of parameter "attn.qkv.weight".
    """
    found: dict[str, PackedPart] = {}
    for name, child in module.named_modules():
        if isinstance(child, Stored):
            prefix = f"{name}." if name else ""
            for part, place in child.stored_parts().items():
                found[prefix + part] = PackedPart(prefix + place.target, place.start, place.end)
    return found
