"""Shows on a CPU what would break the capture of a program on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CaptureGuard"]

_SYNCS = {  # shapes or Python values that depend on numbers the device has yet to compute
    "_local_scalar_dense": "reads a number back (.item(), float(tensor), `if tensor:`)",
    "nonzero": "makes a shape that depends on values (nonzero, where(condition))",
    "masked_select": "makes a shape that depends on values (masked_select)",
    "equal": "reads a comparison back (torch.equal)",
    "unique_dim": "makes a shape that depends on values (unique)",
    "_unique2": "makes a shape that depends on values (unique)",
    "unique_consecutive": "makes a shape that depends on values (unique_consecutive)",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class CaptureGuard(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A context in which operations that a captured program cannot hold raise AssertionError, naming what to avoid.

    It sees ``.item()``, ``nonzero``, boolean indexing and their kin. ``tensor.tolist()`` of a CPU tensor passes by
    torch unseen.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """``func`` run as it is, unless it cannot be captured."""
        name = str(func).split(".")[1]
        assert name not in _SYNCS, f"{func} {_SYNCS[name]}; a captured program cannot hold it"
        if name in _INDEXING:
            masks = [
                index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)
            ]
            assert not masks, (
                f"{func} indexes with a boolean mask; use where or masked_fill in a captured program"
            )
        return func(*args, **(kwargs or {}))
