"""One plugin's hooks, checked against the specifications. Each plugin has its own, so that each fails alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from kestrel.errors import PluginError, closest
from kestrel.plugins import hookspecs
from kestrel.plugins.registry import Contribution
from kestrel.spi import PROJECT, VERSION, KernelBackend, ModelFamily, Skill, Source

__all__ = ["HOOKS", "SPI_VERSION_NAME", "Relay"]

HOOKS: tuple[str, ...] = tuple(hookspecs.__all__)
SPI_VERSION_NAME = "KESTREL_SPI_VERSION"


class Relay:
    """The hooks of one imported plugin.

    Raises PluginError when the plugin was written for another SPI version, implements no hook, misspells one, or
    asks for arguments that a hook does not have.
    """

    def __init__(self, name: str, plugin: object) -> None:
        _check_version(name, plugin)
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        try:
            self._manager.register(plugin, name=name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin {name!r} implements a hook wrongly: {error}") from error
        _check_spelling(name, plugin, self._manager)
        self.hooks = tuple(caller.name for caller in self._manager.get_hookcallers(plugin) or ())

    def contribution(self) -> Contribution:
        """What the plugin registers. PluginError for a wrong kind of thing; what a hook raises passes through."""
        hook = self._manager.hook
        return Contribution(
            families=_all(hook.kestrel_model_families, ModelFamily, "name"),
            backends=_all(hook.kestrel_kernel_backends, KernelBackend, "name"),
            skills=_all(hook.kestrel_skills, Skill, "name"),
            sources=_all(hook.kestrel_model_sources, Source, "scheme"),
            adapter_sources=_all(hook.kestrel_adapter_sources, Source, "scheme"),
        )

    def call(self, hook: str, **arguments: object) -> list[Any]:
        """What the plugin's implementation of ``hook`` returned: empty when it has none or returned None."""
        results: list[Any] = self._manager.hook.__dict__[hook](**arguments)
        return results


def _check_version(name: str, plugin: object) -> None:
    found = vars(plugin).get(SPI_VERSION_NAME)
    if found is None:
        raise PluginError(
            f"plugin {name!r} does not state the SPI version it was written for. "
            f"Put {SPI_VERSION_NAME} = {VERSION} into its entry-point module"
        )
    if found != VERSION:
        raise PluginError(
            f"plugin {name!r} was written for SPI version {found!r}, this Kestrel has version {VERSION}. "
            "Install a release of the plugin that fits, or another kestrel-core"
        )


def _check_spelling(name: str, plugin: object, manager: pluggy.PluginManager) -> None:
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
            raise PluginError(
                f"plugin {name!r} implements an unknown hook {caller.name!r}. {closest(caller.name, HOOKS)}"
            )
    marked = {caller.name for caller in callers}
    for attribute, value in vars(plugin).items():
        if attribute in HOOKS and callable(value) and attribute not in marked:
            raise PluginError(
                f"plugin {name!r} defines {attribute!r} without the marker kestrel.spi.hookimpl"
            )
    if not marked:
        raise PluginError(f"plugin {name!r} implements no hook. Choices: {', '.join(HOOKS)}")


def _all(hook: Any, kind: type[Any], key: str) -> tuple[Any, ...]:
    found = []
    for result in hook():
        if not isinstance(result, Iterable):
            raise PluginError(f"{hook.name} returned a {type(result).__name__}; it must return a sequence")
        for item in result:
            if not isinstance(item, kind):
                raise PluginError(
                    f"{hook.name} returned a {type(item).__name__}; each must be a {kind.__name__} instance"
                )
            name = getattr(item, key, None)
            if not isinstance(name, str) or not name:
                raise PluginError(
                    f"{type(item).__name__} of {hook.name} has no {key}; give it a non-empty string"
                )
            found.append(item)
    return tuple(found)
