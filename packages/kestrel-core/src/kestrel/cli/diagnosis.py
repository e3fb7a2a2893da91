"""What ``kestrel doctor`` finds: the machine, its devices, backends and plugins, and a model's op table."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kestrel.cli import output, session, tables
from kestrel.cli.options import ModelOptions
from kestrel.errors import InvalidRequestError
from kestrel.spi import OpQuery

if TYPE_CHECKING:
    from kestrel.ops import OpChoice
    from kestrel.plugins import PluginHost
    from kestrel.spi import KernelBackend

__all__ = ["diagnose"]

PACKAGES = (
    "kestrel-core",
    "torch",
    "triton",
    "numpy",
    "pillow",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
)
MAX_CUDA_DEVICES = 64


async def diagnose(model: ModelOptions, *, json: bool) -> None:
    """Print what is here; when the options name a model, load it and print which provider serves each op.

    A model that does not load ends in its error, behind what is here.
    """
    facts = _machine(session.load_plugins())
    names_one = model.model or model.model_path
    if not json or not names_one:
        tables.print_facts(facts, json=json)
    if not names_one:
        return
    try:
        loaded, choices = await _loaded(model)
    except Exception as error:
        if json:
            output.print_json({**facts, **output.failure_json(None, error)})
        raise
    if json:
        output.print_json({**facts, **loaded, "ops": _op_rows(choices)})
        return
    tables.print_facts(loaded, json=False)
    tables.print_rows(_told(choices, _absent(facts["backends"])), ("op", "provider", "rejected"), json=False)


def _machine(host: PluginHost) -> dict[str, Any]:
    return {
        "python": f"{platform.python_version()} ({platform.platform()})",
        "packages": _packages(host),
        "devices": _devices(),
        "backends": _backends(host),
        "plugins": {info.name: _plugin_state(info.error, info.is_enabled) for info in host.plugins},
        "failures": {name: f"{type(error).__name__}: {error}" for name, error in host.failed.items()},
    }


async def _loaded(model: ModelOptions) -> tuple[dict[str, str], list[OpChoice]]:
    """The model's name and how it decodes; who serves its ops."""
    async with session.opened(model) as engine:
        facts = {"model": engine.models[0], "decode": await session.decode_path(engine)}
        return facts, await session.op_choices(engine)


def _packages(host: PluginHost) -> dict[str, str]:
    """Versions of what Kestrel and kernel backends stand on, and of the distributions that plugins come from."""
    plugins = {info.distribution: info.version for info in host.plugins if info.distribution}
    return {name: _version(name) for name in PACKAGES} | dict(sorted(plugins.items()))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, str]:
    from kestrel.device import describe, free_memory, resolve_device, total_memory

    found: dict[str, str] = {}
    for name in (*(f"cuda:{index}" for index in range(MAX_CUDA_DEVICES)), "mps", "cpu"):
        try:
            device = resolve_device(name)
        except InvalidRequestError:
            continue
        memory = f"{free_memory(device) / 2**30:.1f} of {total_memory(device) / 2**30:.1f} GiB free"
        found[name] = f"{describe(device)}; {memory}"
    found["auto"] = str(resolve_device("auto"))
    return found


def _backends(host: PluginHost) -> dict[str, dict[str, str]]:
    from kestrel.device import resolve_device
    from kestrel.ops import probe_backend
    from kestrel.spi import Available

    shown = {"reference": {"every device": "available: plain torch"}}
    devices = {str(resolve_device("auto")), "cpu"}
    for backend in sorted(host.backends.values(), key=lambda b: (-b.priority, b.name)):
        shown[backend.name] = {}
        for device in sorted(devices):
            answer = probe_backend(backend, resolve_device(device))
            available = isinstance(answer, Available)
            detail = answer.detail if isinstance(answer, Available) else answer.reason
            shown[backend.name][device] = ": ".join(
                part for part in ("available" if available else "unavailable", detail) if part
            )
            if available:
                shown[backend.name] |= _remarks(backend)
    return shown


def _remarks(backend: KernelBackend) -> dict[str, str]:
    """What is wrong with the ops of ``backend``: it fails to name them, or nobody will ask for some."""
    from kestrel.ops import unknown_ops

    try:
        unknown = unknown_ops(backend.impls())
    except (Exception, SystemExit) as error:
        return {"offers": f"nothing: it failed ({type(error).__name__}: {error})"}
    told = ", ".join(f"{op} (did you mean {near}?)" if near else op for op, near in unknown.items())
    return {"unknown ops": told} if told else {}


def _plugin_state(error: Exception | None, is_enabled: bool) -> str:
    if error is not None:
        return f"failed: {type(error).__name__}: {error}"
    return "ok" if is_enabled else "left out by KESTREL_PLUGINS"


def _op_rows(choices: Sequence[OpChoice]) -> list[dict[str, Any]]:
    return [
        {
            "op": str(choice.query),
            "provider": choice.provider,
            "rejected": dict(choice.rejected),
        }
        for choice in choices
    ]


def _absent(backends: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Backends that run on no device here: their reason stands in the list of backends."""
    return {
        name
        for name, devices in backends.items()
        if all(state.startswith("unavailable") for state in devices.values())
    }


def _told(choices: Sequence[OpChoice], absent: Collection[str]) -> list[dict[str, Any]]:
    """As ``_op_rows`` for a reader: one line for an op that is served alike for several buckets of rows."""
    lines: dict[tuple[str, str, str], tuple[list[OpChoice], Mapping[str, str]]] = {}
    for choice in choices:
        rejected = {name: why for name, why in choice.rejected.items() if name not in absent}
        key = (_without_rows(choice), choice.provider, str(rejected))
        lines.setdefault(key, ([], rejected))[0].append(choice)
    return [
        {"op": _named(alike, op), "provider": provider, "rejected": rejected}
        for (op, provider, _), (alike, rejected) in lines.items()
    ]


def _without_rows(choice: OpChoice) -> str:
    facts = {name: value for name, value in choice.query.facts if name != "rows"}
    return str(OpQuery.of(choice.query.op, **facts))


def _named(choices: Sequence[OpChoice], op: str) -> str:
    """``op`` with the buckets of rows of ``choices``, which are alike but for them; the last bucket, 0, has no end."""
    if len(choices) == 1:
        return str(choices[0].query)
    buckets = sorted(choice.query.get("rows") for choice in choices)
    ends = [str(bucket) for bucket in buckets if bucket]
    return f"{op}, rows to {', '.join(ends)}" + (" and more" if 0 in buckets else "")
