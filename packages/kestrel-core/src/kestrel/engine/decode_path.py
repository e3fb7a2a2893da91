"""How a model decodes: captured programs or op by op, as ``decode_path`` asks for and device and kernels allow."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from kestrel.config import RuntimeConfig
from kestrel.device.graphs import Graphs, graphs_for
from kestrel.errors import InvalidRequestError, LoadError, NoKernelError
from kestrel.lanes import DeviceThread, StepLane, TokenLane
from kestrel.ops import OpTable

__all__ = ["DecodePath", "capture_decode", "check_decode_path"]

log = logging.getLogger("kestrel.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePath:
    """``sizes``: numbers of rows with captured programs. None: decode runs op by op, for ``reason``."""

    sizes: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if not self.sizes:
            return f"op by op: {self.reason}"
        return f"captured programs for {', '.join(map(str, self.sizes))} rows"


def check_decode_path(config: RuntimeConfig, device: torch.device) -> None:
    """InvalidRequestError when programs are asked for and ``device`` captures none. Before anything is read."""
    reason = _forbidden(config, device)
    if reason and config.decode_path == "generated":
        raise InvalidRequestError(
            _unmet(f"{reason}. Choose another device, or decode_path 'auto' or 'native'")
        )


def capture_decode(
    config: RuntimeConfig,
    device: torch.device,
    ops: OpTable,
    lane: TokenLane | StepLane,
    thread: DeviceThread,
) -> DecodePath:
    """Capture decode programs on the device thread where that is wanted and possible; what came of it.

    With ``decode_path`` "generated", raises what prevents it: InvalidRequestError for a model without decode steps,
    NoKernelError naming the ops, LoadError when a call cannot be captured.
    """
    must = config.decode_path == "generated"
    graphs = graphs_for(device)
    reason = _forbidden(config, device)
    if graphs is None or reason:
        return DecodePath(reason=reason)
    if not isinstance(lane, TokenLane):
        if must:
            raise InvalidRequestError(
                _unmet("this model has no decode steps. Use decode_path 'auto' or 'native'")
            )
        return DecodePath(reason="the model has no decode steps")
    eager = ops.eager_in("decode")
    if eager:
        named = "; ".join(f"{choice.query} by {choice.provider}" for choice in eager)
        if must:
            reasons = {name: why for choice in eager for name, why in choice.rejected.items()}
            raise NoKernelError(
                _unmet(f"these ops cannot be captured: {named}. Install a kernel backend that serves them"),
                reasons=reasons,
            )
        thread.call(lambda: lane.capture(graphs, decode=False)).result()
        return _native(f"these ops cannot be captured: {named}")
    return _captured(graphs, lane, thread, must)


def _captured(graphs: Graphs, lane: TokenLane, thread: DeviceThread, must: bool) -> DecodePath:
    started = time.perf_counter()
    try:
        thread.call(lambda: lane.capture(graphs)).result()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if must:
            raise LoadError(
                _unmet(
                    f"the model's decode step could not be captured ({said}). Use decode_path 'auto' or 'native'"
                )
            ) from error
        return _native(f"its capture failed ({said})")
    path = DecodePath(sizes=lane.captured_sizes)
    log.info("decode runs as %s, captured in %.1f s", path, time.perf_counter() - started)
    return path


def _forbidden(config: RuntimeConfig, device: torch.device) -> str:
    """Why nothing is captured whatever the model is; "" when nothing speaks against it."""
    if config.decode_path == "native":
        return "decode_path is 'native'"
    if not config.enable_cuda_graphs:
        return "enable_cuda_graphs is off"
    if graphs_for(device) is None:
        return f"programs are captured on CUDA devices, and this is {device}"
    return ""


def _native(reason: str) -> DecodePath:
    log.warning("decode runs op by op, which is slower: %s", reason)
    return DecodePath(reason=reason)


def _unmet(found: str) -> str:
    return f"decode_path is 'generated', and {found}"
