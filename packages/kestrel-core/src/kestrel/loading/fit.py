"""Does a checkpoint fit a module? Decided from names, shapes and dtypes, before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from kestrel.errors import LoadError
from kestrel.loading.targets import Rename, Target, renamer, slots, target_of
from kestrel.spi import TensorInfo

__all__ = ["Fit", "Transform", "find_fit", "matching"]

T = TypeVar("T")

Transform = Callable[[torch.Tensor], torch.Tensor]

_SHOWN = 20  # names per list in a message; the error's attributes hold all

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_PLAIN_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(slots=True)
class Fit:
    """What goes where, and what does not. ``sources`` maps a checkpoint's tensor to its target."""

    sources: dict[str, Target] = field(default_factory=dict)
    tied: dict[str, Target] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)

    def check(self, what: str) -> None:
        """LoadError with the whole report unless everything fits."""
        if not (self.missing or self.unexpected or self.misshapen):
            return
        lines = [f"the checkpoint does not fit {what}:"]
        for title, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of a wrong shape or dtype", self.misshapen),
        ):
            lines += self._lines(title, names)
        lines.append("Check that config and weights are of one model and revision, and download them again.")
        raise LoadError(
            "\n".join(lines), missing=self.missing, unexpected=self.unexpected, misshapen=self.misshapen
        )

    def _lines(self, title: str, names: list[str]) -> Iterator[str]:
        if names:
            yield f"  {title} ({len(names)}):"
            for name in names[:_SHOWN]:
                yield f"    {name}{': ' + self.details[name] if name in self.details else ''}"
            if len(names) > _SHOWN:
                yield f"    … and {len(names) - _SHOWN} more"


def find_fit(
    module: nn.Module,
    tensors: Mapping[str, TensorInfo],
    *,
    rename: Rename,
    ignore: Mapping[str, str],
    transforms: Mapping[str, Transform],
    tied: Mapping[str, str],
) -> Fit:
    """How ``tensors`` fit ``module``; see ``load_weights`` for the arguments."""
    fit = Fit()
    wanted = slots(module)
    find, new_name = target_of(module), renamer(rename)
    for name, info in tensors.items():
        if matching(ignore, name) is not None:
            continue
        target = find(new_name(name))
        if target is None:
            fit.unexpected.append(name)
            fit.details[name] = f"{info.dtype} {list(info.shape)}"
        elif target.name in tied:
            fit.tied[name] = Target(tied[target.name], target.start, target.end)
        else:
            _place(fit, name, info, target, wanted[target.name], matching(transforms, new_name(name)))
    _check_coverage(fit, {name: slot for name, slot in wanted.items() if name not in tied})
    for name, other in tied.items():
        if name not in wanted or other not in wanted or other in tied:
            raise LoadError(
                f"{name!r} is declared tied to {other!r}, which {type(module).__name__} does not have so"
            )
    return fit


def matching(table: Mapping[str, T], name: str) -> T | None:
    """The value of the first pattern (``*`` matches anything) in ``table`` that matches ``name``, or None."""
    return next((value for pattern, value in table.items() if fnmatchcase(name, pattern)), None)


def _place(
    fit: Fit, name: str, info: TensorInfo, target: Target, slot: torch.Tensor, transform: Transform | None
) -> None:
    problem = _mismatch(info, target.rows(slot), transform)
    if problem is not None:
        fit.misshapen.append(name)
        fit.details[name] = problem
    fit.sources[name] = target


def _mismatch(info: TensorInfo, slot: torch.Tensor, transform: Transform | None) -> str | None:
    shape, is_float = info.shape, info.dtype in _PLAIN_FLOATS
    if transform is not None:
        try:
            made = transform(torch.empty(info.shape, dtype=_DTYPES[info.dtype], device="meta"))
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            return f"{info.dtype} {list(info.shape)} cannot be transformed: {error}"
        shape, is_float = tuple(made.shape), made.dtype.is_floating_point
    if tuple(shape) != tuple(slot.shape):
        return f"{list(shape)} in the checkpoint, {list(slot.shape)} in the model"
    if slot.dtype.is_floating_point and slot.dtype.itemsize == 1:
        if _DTYPES.get(info.dtype) == slot.dtype:
            return None
        return f"{info.dtype} in the checkpoint, the model takes {slot.dtype}"
    if slot.dtype.is_floating_point != is_float:
        wants = "a float of 16 bits or more" if slot.dtype.is_floating_point else str(slot.dtype)
        return f"{info.dtype} in the checkpoint, the model takes {wants}"
    if not is_float and transform is None and _DTYPES.get(info.dtype) != slot.dtype:
        return f"{info.dtype} in the checkpoint, the model takes {slot.dtype}"
    return None


def _check_coverage(fit: Fit, wanted: Mapping[str, torch.Tensor]) -> None:
    by_slot: dict[str, list[tuple[Target, str]]] = {}
    for source, target in fit.sources.items():
        by_slot.setdefault(target.name, []).append((target, source))
    for name, slot in wanted.items():
        rows = len(slot) if slot.ndim else 1
        at = 0
        for start, end, source in sorted(_extents(by_slot.get(name, ()), rows)):
            if start < at:
                fit.unexpected.append(source)
                fit.details[source] = f"{name} is already filled by another tensor"
            elif start > at:
                _miss(fit, name, f"rows {at} to {start}")
            at = max(at, end)
        if name not in by_slot:
            _miss(fit, name, f"{list(slot.shape)}")
        elif at < rows:
            _miss(fit, name, f"rows {at} to {rows}")


def _extents(targets: Iterable[tuple[Target, str]], rows: int) -> Iterator[tuple[int, int, str]]:
    for target, source in targets:
        yield target.start, rows if target.end is None else target.end, source


def _miss(fit: Fit, name: str, detail: str) -> None:
    if name not in fit.missing:
        fit.missing.append(name)
    fit.details.setdefault(name, detail)
