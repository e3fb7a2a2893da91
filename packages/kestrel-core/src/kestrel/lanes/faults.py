"""Failures of one launch as the errors that its works end with."""

from __future__ import annotations

from kestrel.errors import KestrelError, ModelFaultError

__all__ = ["fault", "own_error"]


def fault(work_id: int, what: str, error: BaseException) -> ModelFaultError:
    """A ModelFaultError for work ``work_id``, chained to what was raised."""
    failure = ModelFaultError(
        f"work {work_id}: {what} ({type(error).__name__}: {error}). "
        "This request alone is lost; if it repeats, look at the model and its kernels (kestrel doctor)."
    )
    failure.__cause__ = error
    return failure


def own_error(work_id: int, what: str, error: BaseException) -> KestrelError:
    """``error`` itself when it is one of ours, else as a fault."""
    return error if isinstance(error, KestrelError) else fault(work_id, what, error)
