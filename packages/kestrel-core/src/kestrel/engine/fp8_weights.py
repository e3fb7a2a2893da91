"""Whether a model whose weights shall stay in 8 bits has any that do."""

from __future__ import annotations

from kestrel.config import RuntimeConfig
from kestrel.errors import InvalidRequestError
from kestrel.ops import OpTable

__all__ = ["check_fp8_weights"]

_OPS = ("fp8_linear", "fp8_grouped_experts")


def check_fp8_weights(ops: OpTable, config: RuntimeConfig) -> None:
    """InvalidRequestError when they were asked for and the model that was built with ``ops`` multiplies by none."""
    if config.fp8_weights != "keep" or any(row.query.op in _OPS for row in ops.rows()):
        return
    raise InvalidRequestError(
        f"fp8_weights 'keep' was asked for, and {config.label} has no weights that can stay in 8 bits: its checkpoint "
        "is not in block FP8, or its family does not multiply by such weights. Leave fp8_weights out."
    )
