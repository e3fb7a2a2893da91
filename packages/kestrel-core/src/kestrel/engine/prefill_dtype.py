"""The dtype that encoders and prefill multiply in, where ``prefill_dtype`` asks for another than the model's."""

from __future__ import annotations

import torch

from kestrel.config import RuntimeConfig
from kestrel.engine.kv_dtype import TORCH_NAMES, lack_of_8_bits
from kestrel.errors import InvalidRequestError
from kestrel.ops import OpTable

__all__ = ["check_prefill_dtype", "prefill_dtype_of"]


def prefill_dtype_of(config: RuntimeConfig, device: torch.device) -> str:
    """The torch name of that dtype, or "auto"; InvalidRequestError where ``device`` cannot multiply in it."""
    name = TORCH_NAMES[config.prefill_dtype]
    if name != "auto" and (lack := lack_of_8_bits(device)):
        raise InvalidRequestError(
            f"prefill_dtype {config.prefill_dtype!r} was asked for, and {lack}. "
            "Use prefill_dtype 'auto', or a CUDA device of compute capability 8.9 or newer."
        )
    return name


def check_prefill_dtype(ops: OpTable, config: RuntimeConfig) -> None:
    """InvalidRequestError when it was asked for and the model that was built with ``ops`` has no product in it."""
    if ops.prefill_dtype == "auto" or any(row.query.op == "e4m3_linear" for row in ops.rows()):
        return
    raise InvalidRequestError(
        f"prefill_dtype {config.prefill_dtype!r} was asked for, and {config.label} is of a family that does not "
        "multiply in 8 bits. Use prefill_dtype 'auto'."
    )
