"""Fills a module that was built on the meta device, strictly both ways and one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from kestrel.errors import LoadError
from kestrel.loading.fit import Fit, Transform, find_fit, matching
from kestrel.loading.headers import BITS
from kestrel.loading.targets import Rename, Target, renamer, slots
from kestrel.spi import WeightReader

__all__ = ["load_weights"]

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_TRANSFORMS: Mapping[str, Transform] = MappingProxyType({})
_NO_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({})


def load_weights(
    module: nn.Module,
    reader: WeightReader,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    rename: Rename = _NOTHING,
    ignore: Mapping[str, str] = _NOTHING,
    transforms: Mapping[str, Transform] = _NO_TRANSFORMS,
    tied: Mapping[str, str] = _NOTHING,
    dtypes: Mapping[str, torch.dtype] = _NO_DTYPES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill ``module`` (built under ``torch.device("meta")``) from ``reader``, in place.

    Floating-point tensors become ``dtype``, or the one that ``dtypes`` gives for their name; others, and 8-bit floats
    in modules built for them, keep theirs.
    ``rename``: a function from the checkpoint's names to the module's, or a mapping of whole names and of prefixes
    that end with ".". A part of a ``layers.Packed`` is named like a submodule of it ("attn.qkv.q.weight").
    ``ignore``: checkpoint names to leave out, with the reason. ``transforms``: applied to the tensors of these module
    names (transposes, reshapes). ``tied``: module names whose tensor is another one's; when the checkpoint holds both,
    they must be equal. Keys of ``ignore``, ``transforms`` and ``dtypes`` may hold ``*``. ``progress(done, total)``
    counts bytes of the checkpoint.

    Buffers that are not in the checkpoint (``persistent=False``) must be computed at construction on the CPU by name
    (``device="cpu"``); they are moved to ``device`` as they are.

    Afterwards the module is in evaluation mode and no parameter asks for a gradient. Each tensor is copied once, so
    peak memory is the converted weights and the largest tensor. Raises LoadError listing all that is missing,
    unexpected, misshapen or of a wrong dtype, before any tensor is read.
    """
    fit = find_fit(module, reader.tensors, rename=rename, ignore=ignore, transforms=transforms, tied=tied)
    fit.missing += _uncomputed_buffers(module)
    fit.check(type(module).__name__)
    _check_tied(fit, reader)
    sizes = {name: _nbytes(reader, name) for name in fit.sources}
    done, total = 0, sum(sizes.values())
    wanted, new_name, made = slots(module), renamer(rename), dict[str, torch.Tensor]()
    for name, target in sorted(
        fit.sources.items(), key=lambda item: (reader.tensors[item[0]].file, item[1].name)
    ):
        slot = wanted[target.name]
        if target.name not in made:
            is_own = not slot.dtype.is_floating_point or slot.dtype.itemsize == 1
            kept = slot.dtype if is_own else matching(dtypes, target.name) or dtype
            made[target.name] = torch.empty(slot.shape, dtype=kept, device=device)
            _assign(module, target.name, made[target.name])
        transform = matching(transforms, new_name(name))
        source = reader.get(name)
        target.rows(made[target.name]).copy_(source if transform is None else transform(source))
        done += sizes[name]
        if progress is not None:
            progress(done, total)
    _finish(module, tied, device)


def _check_tied(fit: Fit, reader: WeightReader) -> None:
    first: dict[Target, str] = {target: name for name, target in fit.sources.items()}
    for name, target in fit.tied.items():
        other = first.get(target)
        if other is not None and not torch.equal(reader.get(name), reader.get(other)):
            raise LoadError(
                f"{name!r} and {other!r} are one tensor in this model, but the checkpoint holds two different ones. "
                "Its config may belong to another model",
                misshapen=[name],
            )


def _uncomputed_buffers(module: nn.Module) -> list[str]:
    persistent = slots(module)
    return [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in persistent]


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):  # another name's, shared
        owner._parameters[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _finish(module: nn.Module, tied: Mapping[str, str], device: torch.device | str) -> None:
    filled = slots(module)
    for name, other in tied.items():
        _assign(module, name, filled[other])
    for name, buffer in list(module.named_buffers()):
        if name not in filled:
            _assign(module, name, buffer.to(device))
    left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    assert not left, f"unfilled after loading: {left}"
    module.eval()


def _nbytes(reader: WeightReader, name: str) -> int:
    info = reader.tensors[name]
    return int(torch.Size(info.shape).numel() * BITS[info.dtype] // 8)
