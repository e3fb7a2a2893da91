"""Op contracts, their references in plain torch, and the table that says which provider serves which query."""

from kestrel.ops.linear import row_bucket
from kestrel.ops.op import Case, Inputs, Op, Tolerance, dtype_name
from kestrel.ops.registry import OPS, RESERVED, unknown_ops
from kestrel.ops.table import REFERENCE, OpChoice, OpTable, probe_backend, resolve_ops
from kestrel.ops.write_kv import copy_page

__all__ = [
    "OPS",
    "RESERVED",
    "REFERENCE",
    "Case",
    "Inputs",
    "Op",
    "OpChoice",
    "OpTable",
    "Tolerance",
    "copy_page",
    "dtype_name",
    "probe_backend",
    "resolve_ops",
    "row_bucket",
    "unknown_ops",
]
