"""Whether prefill runs as captured programs: where device and kernels allow, and never a reason to fail."""

from __future__ import annotations

import logging

import torch

from kestrel.config import RuntimeConfig
from kestrel.device.graphs import graphs_for
from kestrel.lanes import DeviceThread, StepLane, TokenLane
from kestrel.ops import OpTable

__all__ = ["capture_prefill"]

log = logging.getLogger("kestrel.engine")


def capture_prefill(
    config: RuntimeConfig,
    device: torch.device,
    ops: OpTable,
    lane: TokenLane | StepLane,
    thread: DeviceThread,
) -> None:
    """Capture prefill programs on the device thread where that is possible, after decode was captured.

    Long launches keep a device busy however they are made, so where nothing can be captured this only says so.
    """
    wanted = config.decode_path != "native" and config.enable_cuda_graphs and graphs_for(device) is not None
    if not wanted or not isinstance(lane, TokenLane):
        return
    eager = ops.eager_in("prefill")
    if eager:
        named = "; ".join(f"{choice.query} by {choice.provider}" for choice in eager)
        log.info("prefill runs op by op: these ops cannot be captured: %s", named)
        return
    try:
        thread.call(lane.capture_prefill).result()
    except Exception as error:
        log.warning("prefill runs op by op: its capture failed (%s: %s)", type(error).__name__, error)
        return
    log.info("prefill runs as programs of %s tokens", ", ".join(map(str, lane.captured_prefills)))
