"""Where each tensor of a checkpoint goes: a parameter or persistent buffer, or rows of one (``layers.Packed``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kestrel.layers import packed_parts

__all__ = ["Rename", "Target", "renamer", "slots", "target_of"]

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Target:
    """Rows ``start`` to ``end`` of ``name``: a parameter or persistent buffer; the whole of it when ``end`` is None."""

    name: str
    start: int = 0
    end: int | None = None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``tensor`` (the whole parameter) that this names."""
        return tensor if self.end is None else tensor[self.start : self.end]


def slots(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of ``module`` by name, tied ones under each of their names."""
    found: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return found


def target_of(module: nn.Module) -> Callable[[str], Target | None]:
    """The function from a name in ``module`` to its target: a parameter, a buffer or a part of a packed weight."""
    whole = slots(module)
    parts = packed_parts(module)

    def find(name: str) -> Target | None:
        if name in whole:
            return Target(name)
        if part := parts.get(name):
            return Target(part.target, part.start, part.end)
        return None

    return find


def renamer(rename: Rename) -> Callable[[str], str]:
    """The function from a checkpoint's names to the module's.

    A mapping holds whole names, or prefixes that end with "."; the longest prefix wins, "" is a prefix of all.
    """
    if not isinstance(rename, Mapping):
        return rename
    table = dict(rename)
    prefixes = sorted((key for key in table if not key or key.endswith(".")), key=len, reverse=True)

    def renamed(name: str) -> str:
        if name in table:
            return table[name]
        for prefix in prefixes:
            if name.startswith(prefix):
                return table[prefix] + name[len(prefix) :]
        return name

    return renamed
