"""From a blueprint to a loaded model on its device thread: weights, ops, pools. On a worker thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from kestrel.device import counts_peaks
from kestrel.engine.decode_path import DecodePath, capture_decode, check_decode_path
from kestrel.engine.fp8_weights import check_fp8_weights
from kestrel.engine.kv_dtype import check_recurrent_dtype, kv_dtype_of, set_kv_dtype
from kestrel.engine.loaded import LoadedModel, Shared
from kestrel.engine.loading import Blueprint, ProgressReport
from kestrel.engine.memory import Demand, return_memory, settle_memory
from kestrel.engine.prefill_dtype import check_prefill_dtype, prefill_dtype_of
from kestrel.engine.prefill_path import capture_prefill
from kestrel.engine.router import Router
from kestrel.engine.stages import Stages
from kestrel.engine.warm_up import capture_encoders, compile_kernels, first_launches
from kestrel.errors import CapacityError, KestrelError, LoadError
from kestrel.lanes import DeviceThread, StepLane, TokenLane, build_token_lane, launch_memory
from kestrel.loading import SafetensorsReader, load_tokenizer
from kestrel.loading.headers import BITS
from kestrel.media import load_decoders
from kestrel.ops import OpTable, resolve_ops
from kestrel.sampling import resolve_sampling
from kestrel.spi import BuildContext, Built, StepDriver, TensorInfo, TokenDriver

if TYPE_CHECKING:
    from kestrel.spi import WeightReader

__all__ = ["load_model"]

log = logging.getLogger("kestrel.engine")


def load_model(
    blueprint: Blueprint,
    device: torch.device,
    demand: Demand,
    thread: DeviceThread,
    shared: Shared,
    progress: ProgressReport,
) -> LoadedModel:
    """The model built and on its device thread. ``progress`` may raise to end the work between two tensors.

    Raises LoadError, CapacityError, NoKernelError, or InvalidRequestError for a setting that cannot be.
    """
    config = blueprint.config
    check_decode_path(config, device)
    backends = tuple(shared.host.backends.values())
    kv_dtype = kv_dtype_of(config, device)
    ops = resolve_ops(
        (),
        device,
        backends,
        overrides=config.ops,
        strict=config.strict_ops,
        kv_dtype=kv_dtype,
        prefill_dtype=prefill_dtype_of(config, device),
    )
    stages = Stages()
    try:
        with stages("weights"):
            built = _build(blueprint, device, demand, ops, progress)
            set_kv_dtype(built, kv_dtype, config)
            check_recurrent_dtype(built, config)
            check_prefill_dtype(ops, config)
            check_fp8_weights(ops, config)
        with stages("kernels"):
            for query in built.main.spec.op_needs:
                ops.resolve(query)
            if isinstance(built.main, TokenDriver):
                resolve_sampling(ops, built.main.spec.vocab_size, demand.dtype)
            compile_kernels(ops, config)
        with stages("largest launches"):
            demand = _settled(demand, built, blueprint, device, ops, thread)
        with stages("pools"):
            lane = _make_lane(built, blueprint, device, demand, ops, shared.router)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        raise CapacityError(
            f"loading {blueprint.card.model_id!r} ran out of memory on {device}: {str(error) or 'no memory'}. "
            f"Lower {demand.setting}, max_batch_size or max_batched_tokens, or choose a smaller dtype or model."
        ) from error
    _log_place(blueprint, device, demand)
    decode = _warm_up(built, blueprint, device, ops, lane, thread, progress, stages)
    log.info("model %s was made ready in %s", blueprint.card.model_id, stages)
    thread.add(lane)
    return LoadedModel(blueprint, built, lane, thread, shared, ops, decode)


def _log_place(blueprint: Blueprint, device: torch.device, demand: Demand) -> None:
    log.info(
        "model %s (%s) runs on %s as %s, %.1f MiB of weights",
        blueprint.card.model_id,
        blueprint.family.name,
        device,
        str(demand.dtype).removeprefix("torch."),
        demand.weight_bytes / 2**20,
    )


def _build(
    blueprint: Blueprint, device: torch.device, demand: Demand, ops: OpTable, progress: ProgressReport
) -> Built:
    card, family = blueprint.card, blueprint.family
    with SafetensorsReader.of(card) as reader:
        weights = _Reported(reader, progress)
        context = BuildContext(
            device=device,
            dtype=demand.dtype,
            ops=ops,
            weights=weights,
            tokenizer=lambda: load_tokenizer(blueprint.tokenizer_path),
            config=blueprint.config,
        )
        try:
            built = family.build(card, context)
            if not isinstance(built, Built):
                raise TypeError(f"build gave a {type(built).__name__}, not a Built")
        except KestrelError:
            raise
        except Exception as error:  # a family is a plugin: what it trips over is a checkpoint it cannot load
            if _is_out_of_memory(error):
                raise
            raise LoadError(
                f"family {family.name!r} cannot build {card.model_id!r}: {type(error).__name__}: {error}. "
                "The checkpoint may be damaged or of a kind that the family does not know"
            ) from error
    progress("load", weights.total, weights.total)
    return built


def _warm_up(
    built: Built,
    blueprint: Blueprint,
    device: torch.device,
    ops: OpTable,
    lane: TokenLane | StepLane,
    thread: DeviceThread,
    progress: ProgressReport,
    stages: Stages,
) -> DecodePath:
    """Do at once what the first request would otherwise wait for."""
    progress("warm-up", 0, 2)
    if any(media.kind == "image" for media in built.main.spec.media):
        load_decoders()
    with stages("kernels"):
        compile_kernels(ops, blueprint.config)  # of whatever launches asked for first
    progress("warm-up", 1, 2)
    with stages("first launches"):
        is_sound = first_launches(lane, thread, type(built.main).__name__)
    if is_sound or blueprint.config.decode_path == "generated":  # then what failed is an error, raised again
        with stages("capture of decode"):
            decode = capture_decode(blueprint.config, device, ops, lane, thread)
        with stages("capture of prefill"):
            capture_prefill(blueprint.config, device, ops, lane, thread)
        with stages("capture of encoders"):
            capture_encoders(lane, thread)
    else:
        decode = DecodePath(reason="its first launch failed")
    progress("warm-up", 2, 2)
    return decode


class _Reported:
    """A ``WeightReader`` that reports the bytes it has read."""

    def __init__(self, reader: WeightReader, progress: ProgressReport) -> None:
        self._reader, self._progress = reader, progress
        self._done = 0
        self.total = sum(_nbytes(tensor) for tensor in reader.tensors.values())

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._reader.tensors

    def names(self) -> Iterator[str]:
        return self._reader.names()

    def get(self, name: str) -> torch.Tensor:
        self._progress("load", min(self._done, self.total), self.total)
        tensor = self._reader.get(name)
        self._done += tensor.nbytes
        return tensor


def _is_out_of_memory(error: Exception) -> bool:
    """Whether ``error`` is an allocator's; that of torch for the CPU has no type of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _nbytes(tensor: TensorInfo) -> int:
    return int(torch.Size(tensor.shape).numel() * BITS[tensor.dtype] // 8)


def _settled(
    demand: Demand,
    built: Built,
    blueprint: Blueprint,
    device: torch.device,
    ops: OpTable,
    thread: DeviceThread,
) -> Demand:
    """``demand`` by what the model's largest launches take on ``device``, where that can be measured."""
    driver, config = built.main, blueprint.config
    if isinstance(driver, StepDriver) or not counts_peaks(device):
        return demand
    try:
        measure = partial(launch_memory, driver, config, device=device, dtype=demand.dtype, ops=ops)
        launch_bytes = thread.call(measure).result()
    except Exception as error:  # requests will meet it again, each with an error of its own
        if _is_out_of_memory(error):
            raise
        log.warning("the largest launches of %s could not be measured", type(driver).__name__, exc_info=error)
        return demand
    finally:
        return_memory(device)
    captures = config.enable_cuda_graphs and config.decode_path != "native"
    return settle_memory(demand, blueprint, device, launch_bytes=launch_bytes, captures=captures)


def _make_lane(
    built: Built, blueprint: Blueprint, device: torch.device, demand: Demand, ops: OpTable, router: Router
) -> TokenLane | StepLane:
    config, driver = blueprint.config, built.main
    if isinstance(driver, StepDriver):
        return StepLane(driver, max_queue=config.max_queue, sink=router.deliver)
    try:
        lane = build_token_lane(
            driver,
            config,
            device=device,
            dtype=demand.dtype,
            kv_bytes=demand.kv_bytes,
            sink=router.deliver,
            setting=demand.setting,
            ops=ops,
        )
    except CapacityError as error:
        raise CapacityError(f"{error} {demand.account}".rstrip()) from None
    most = driver.spec.max_positions
    if config.max_model_len is None and lane.limits.max_len < most:
        log.warning(
            "the context of %s is limited to %d of %d positions by %s; raise it, or set max_model_len",
            blueprint.card.model_id,
            lane.limits.max_len,
            most,
            demand.setting,
        )
    return lane
