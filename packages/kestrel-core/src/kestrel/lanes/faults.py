"""Failures of one launch as the errors that its works end with."""

from __future__ import annotations

import traceback

from kestrel.errors import KestrelError, ModelFaultError

__all__ = ["fault", "lost", "own_error"]


def fault(work_id: int, what: str, error: BaseException) -> ModelFaultError:
    """A ModelFaultError for work ``work_id``, chained to what was raised."""
    failure = ModelFaultError(lost(f"work {work_id}: {what}", error))
    failure.__cause__ = error
    return failure


def lost(what: str, error: BaseException) -> str:
    """The message of a launch that raised: ``what`` failed, where, and what to look at."""
    return (
        f"{what} ({type(error).__name__}{_place(error)}: {error}). This request alone is lost; if it repeats, look at "
        "the model and its kernels (kestrel doctor MODEL), or take an op's kernel out: ops={'add_norm': 'reference'}."
    )


def _place(error: BaseException) -> str:
    """The innermost function that raised; for a kernel its module, which says whose it is."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return f" in {frames[-1].f_globals.get('__name__')}.{frames[-1].f_code.co_name}" if frames else ""


def own_error(work_id: int, what: str, error: BaseException) -> KestrelError:
    """``error`` itself when it is one of ours, else as a fault."""
    return error if isinstance(error, KestrelError) else fault(work_id, what, error)
