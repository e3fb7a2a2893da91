"""Every hook a plugin may implement; ``docs/plugins.md`` describes them for plugin authors.

Hooks register and return descriptors. None runs on the device thread, and none may import torch: heavy imports
belong in what the descriptors do later (``ModelFamily.build``, ``KernelBackend.probe``).
"""

# mypy: disable-error-code="empty-body"
# A hook specification is a signature and a docstring; pluggy never calls it.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kestrel.spi.hooks import hookspec

if TYPE_CHECKING:
    import typer

    from kestrel.config import RuntimeConfig
    from kestrel.engine import InferenceEngine
    from kestrel.spi import KernelBackend, ModelFamily, RequestRecord, Skill, Source

__all__ = [
    "kestrel_adapter_sources",
    "kestrel_commands",
    "kestrel_kernel_backends",
    "kestrel_model_families",
    "kestrel_model_sources",
    "kestrel_request_finished",
    "kestrel_server_routes",
    "kestrel_skills",
]


@hookspec
def kestrel_model_families() -> Sequence[ModelFamily]:
    """Model families: what they recognise, describe and build. Called once, when the host starts."""


@hookspec
def kestrel_kernel_backends() -> Sequence[KernelBackend]:
    """Kernel backends. Called once, when the host starts; ``probe`` is asked later, per device."""


@hookspec
def kestrel_skills() -> Sequence[Skill]:
    """Skills beside the built-in ones. A family supports a skill by naming it in its prompt format."""


@hookspec
def kestrel_model_sources() -> Sequence[Source]:
    """Places that models come from, each under a scheme of its own (``acme:`` in ``acme:some/model``)."""


@hookspec
def kestrel_adapter_sources() -> Sequence[Source]:
    """Places that adapters come from, each under a scheme of its own."""


@hookspec
def kestrel_server_routes(engine: InferenceEngine, config: RuntimeConfig) -> Sequence[object]:
    """Further HTTP routes (Starlette ``Route`` objects) of ``kestrel serve``, over the running ``engine``."""


@hookspec
def kestrel_commands(cli: typer.Typer) -> None:
    """Add commands to ``cli``, the ``kestrel`` command line."""


@hookspec
def kestrel_request_finished(record: RequestRecord) -> None:
    """Observe a request that finished, failed or was cancelled. What this raises is logged and goes no further."""
