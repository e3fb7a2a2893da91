"""The dtype that encoders and prefill multiply in, where ``prefill_dtype`` asks for another than the model's."""

from __future__ import annotations

import torch

from kestrel.config import RuntimeConfig
from kestrel.engine.kv_dtype import torch_name
from kestrel.errors import InvalidRequestError
from kestrel.ops import OpTable

__all__ = ["check_prefill_dtype", "prefill_dtype_of"]


def prefill_dtype_of(config: RuntimeConfig, device: torch.device) -> str:
    """The torch name of that dtype, as ``torch_name``."""
    return torch_name("prefill_dtype", config.prefill_dtype, device)


def check_prefill_dtype(ops: OpTable, config: RuntimeConfig) -> None:
    """InvalidRequestError when it was asked for and the model that was built with ``ops`` has no product in it."""
    if ops.prefill_dtype == "auto" or any(row.query.op == "e4m3_linear" for row in ops.rows()):
        return
    raise InvalidRequestError(
        f"prefill_dtype {config.prefill_dtype!r} was asked for, and {config.label} is of a family that does not "
        "multiply in 8 bits. Use prefill_dtype 'auto'."
    )
