"""What a launch produced, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel.sampling import Sampled, token_logprobs
from kestrel.types import TokenLogprobs

__all__ = ["Pending", "Results", "on_host"]


@dataclass(slots=True)
class Results:
    """Host values of the N rows of a launch, in its order. ``aux`` is None when no row asked for it."""

    ids: list[int]
    stopped: list[bool]
    status: list[int]
    aux: list[list[int]] | None = None
    logprob: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None

    def logprobs(self, index: int, count: int) -> TokenLogprobs | None:
        """The log-probabilities of row ``index`` with its ``count`` likeliest ids; None when no row asked."""
        if self.logprob is None:
            return None
        if self.top_ids is None or self.top_logprobs is None:
            return token_logprobs(self.logprob[index])
        return token_logprobs(self.logprob[index], self.top_ids[index], self.top_logprobs[index], count=count)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` in host memory, complete once an event recorded after this call has passed."""
    if x.device.type != "cuda":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


class Pending:
    """Sampled rows whose copy to the host is under way; ``read`` waits for it."""

    __slots__ = ("_event", "_host", "_packed", "_sampled", "_width")

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled
        self._width = sampled.aux.shape[1] if sampled.has_aux else 0
        self._event: torch.cuda.Event | None = None
        self._packed: torch.Tensor | None = None
        self._host: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if sampled.ids.device.type == "cuda":
            self._copy(sampled)

    def _copy(self, sampled: Sampled) -> None:
        columns = [sampled.ids, sampled.stopped.to(torch.int64), sampled.status.to(torch.int64)]
        aux = sampled.aux.unbind(1) if self._width else ()
        self._packed = on_host(torch.stack([*columns, *aux]))
        if sampled.logprob is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            self._host = (
                on_host(sampled.logprob), on_host(sampled.top_ids), on_host(sampled.top_logprobs)
            )  # fmt: skip
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        self._event.record()

    def read(self) -> Results:
        """The host values. Raises what the device raised while computing them."""
        if self._event is not None:
            return self._read_copied()
        sampled = self._sampled
        results = Results(sampled.ids.tolist(), sampled.stopped.tolist(), sampled.status.tolist())
        if self._width:
            results.aux = sampled.aux.tolist()
        if sampled.logprob is not None:
            results.logprob = sampled.logprob.tolist()
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            results.top_ids, results.top_logprobs = sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        return results

    def _read_copied(self) -> Results:
        assert self._event is not None
        assert self._packed is not None
        self._event.synchronize()  # sync: the host needs this step's tokens; the next step is queued already
        ids, stopped, status, *aux = self._packed.tolist()
        results = Results(ids, [bool(s) for s in stopped], status)
        if self._width:
            results.aux = [list(bins) for bins in zip(*aux, strict=True)]
        if self._host is not None:
            logprob, top_ids, top_logprobs = self._host
            results.logprob, results.top_ids = logprob.tolist(), top_ids.tolist()
            results.top_logprobs = top_logprobs.tolist()
        return results
