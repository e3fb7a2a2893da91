"""Which provider serves which query: user override, then backends by priority, then the reference.

Does not know models; a driver's needs and the layers' queries come in as ``OpQuery``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kestrel.errors import NoKernelError, PluginError, closest
from kestrel.ops.registry import OPS, unknown_ops
from kestrel.spi.backend import Available, Impl, KernelBackend, No, OpCall, OpQuery, Unavailable, Yes

__all__ = ["REFERENCE", "OpChoice", "OpTable", "probe_backend", "resolve_ops"]

REFERENCE = "reference"
log = logging.getLogger(__name__)

PLUGIN_ERRORS = (Exception, SystemExit)  # a backend is a plugin: none of these ends the program


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChoice:
    """One row of ``kestrel doctor``: who serves ``query``, and why those asked before it do not."""

    query: OpQuery
    provider: str
    rejected: Mapping[str, str] = field(default_factory=dict)


def _always(query: OpQuery) -> Yes | No:
    return Yes()


def _answer(name: str, impl: Impl, query: OpQuery) -> Yes | No:
    try:
        answer = impl.supports(query)
        if not isinstance(answer, Yes | No):
            raise TypeError(f"supports gave a {type(answer).__name__}, neither Yes nor No")
        return answer
    except PLUGIN_ERRORS as error:  # a backend is a plugin: one that fails to answer does not serve
        log.warning("kernel backend %s failed to say whether it serves %s", name, query, exc_info=error)
        return No(f"failed to answer ({type(error).__name__}: {error})")


class OpTable:
    """Ops resolved for one model on one device. A query gets the same answer for the table's whole life.

    ``kv_dtype``: of the model's keys and values in pages, as torch names it, or "auto": the model's own.
    ``prefill_dtype``: likewise what encoders and prefill multiply in, where a family can.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        providers: Mapping[str, Mapping[str, Impl]],
        unavailable: Mapping[str, str],
        overrides: Mapping[str, str],
        strict: bool,
        kv_dtype: str = "auto",
        prefill_dtype: str = "auto",
    ) -> None:
        self.device, self.kv_dtype, self.prefill_dtype = device, kv_dtype, prefill_dtype
        self._providers = providers
        self._unavailable = dict(unavailable)
        self._overrides = dict(overrides)
        self._strict = strict
        self._choices: dict[OpQuery, OpChoice] = {}
        self._impls: dict[OpQuery, Impl] = {}
        self._uncompiled: list[OpQuery] = []

    def resolve(self, query: OpQuery) -> OpCall:
        """The callable that serves ``query``, chosen at the first asking and logged.

        Raises NoKernelError when no provider serves it, or when ``strict`` and only the reference does on an
        accelerator.
        """
        return self._impl(query).fn

    def find(self, query: OpQuery) -> OpCall | None:
        """The callable of the provider that serves ``query``; None when that would be the reference, or nobody.

        For fusions that a layer can as well compute from their parts, each of which has a provider of its own.
        """
        if query not in self._choices:
            rejected: dict[str, str] = {}
            found = self._first(query, rejected)
            if found is None or found[0] == REFERENCE:
                log.debug("%s: from its parts%s", query, _because(rejected))
                return None
            self._keep(query, found, rejected)
        return None if self._choices[query].provider == REFERENCE else self._impls[query].fn

    def pack(self, query: OpQuery, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` as the provider of ``query`` wants it; the reference takes it as it is.

        Raises PluginError when the provider cannot; out of memory stays what it is.
        """
        impl = self._impl(query)
        try:
            return impl.pack(weight)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            name = self._choices[query].provider
            raise PluginError(
                f"kernel backend {name!r} was to lay out the weight of {query} and failed ({type(error).__name__}: "
                f"{error}). Set ops={{{query.op!r}: 'reference'}} to do without it, and tell its authors"
            ) from error

    def rows(self) -> list[OpChoice]:
        """Every query asked so far with its provider, sorted by query."""
        return sorted(self._choices.values(), key=lambda choice: str(choice.query))

    def eager_in(self, program: str) -> list[OpChoice]:
        """Choices that keep ``program`` ("decode", "prefill" or "encode") from being captured. A query that says its
        ``mode`` takes part in that program alone."""
        return [
            choice
            for choice in self.rows()
            if program in self._impls[choice.query].eager_in and choice.query.get("mode", program) == program
        ]

    def compile_jobs(self, row_counts: Mapping[str, Sequence[int]]) -> list[Callable[[], object]]:
        """What compiles every launch of the queries asked since the last call, ready to run on any thread.

        ``row_counts``: numbers of rows that launches will have, by program. A query that says its ``mode`` runs in that
        program alone.
        """
        everywhere = sorted({count for counts in row_counts.values() for count in counts})
        jobs: list[Callable[[], object]] = []
        queries, self._uncompiled = self._uncompiled, []
        for query in queries:
            impl = self._impls[query]
            try:
                jobs += impl.warm(query, row_counts.get(query.get("mode", ""), everywhere))
            except Exception as error:  # a backend is a plugin: it compiles at the first launch then
                name = self._choices[query].provider
                log.warning(
                    "kernel backend %s does not say what to compile for %s", name, query, exc_info=error
                )
        return jobs

    def _impl(self, query: OpQuery) -> Impl:
        known = self._impls.get(query)
        return known if known is not None else self._choose(query)

    def _choose(self, query: OpQuery) -> Impl:
        rejected: dict[str, str] = {}
        found = self._first(query, rejected)
        if found is None:
            raise NoKernelError(
                f"{query} is needed on {self.device}, and no provider serves it: {_reasons(rejected)}. "
                f"Install a kernel backend that does. {closest(query.op, OPS)}",
                reasons=rejected,
            )
        return self._keep(query, found, rejected)

    def _keep(self, query: OpQuery, found: tuple[str, Impl], rejected: Mapping[str, str]) -> Impl:
        choice = OpChoice(query=query, provider=found[0], rejected=rejected)
        self._record(choice)
        self._choices[query] = choice
        self._impls[query] = found[1]
        self._uncompiled.append(query)
        return found[1]

    def _first(self, query: OpQuery, rejected: dict[str, str]) -> tuple[str, Impl] | None:
        """The first provider that says yes; the reasons of those before it go to ``rejected``."""
        for name, impl in self._asked(query, rejected):
            answer = _answer(name, impl, query)
            if isinstance(answer, Yes):
                return name, impl
            rejected[name] = answer.reason
        return None

    def _asked(self, query: OpQuery, rejected: dict[str, str]) -> Iterable[tuple[str, Impl]]:
        """Providers in the order of preference; those that cannot be asked go to ``rejected``."""
        rejected.update(self._unavailable)
        reference = OPS.get(query.op)
        offers = {name: impls[query.op] for name, impls in self._providers.items() if query.op in impls}
        rejected.update({n: f"has no {query.op}" for n in self._providers if n not in offers})
        if reference is not None:
            offers[REFERENCE] = Impl(supports=_always, fn=reference.reference, eager_in=reference.eager_in)
        wanted = self._overrides.get(query.op)
        if wanted is not None:
            if wanted not in offers:
                raise NoKernelError(
                    f"ops={{{query.op!r}: {wanted!r}}} was asked for, but {wanted!r} provides no {query.op} on "
                    f"{self.device}{': ' + rejected[wanted] if wanted in rejected else ''}. {closest(wanted, offers)}",
                    reasons=rejected,
                )
            yield wanted, offers.pop(wanted)
        yield from offers.items()

    def _record(self, choice: OpChoice) -> None:
        fell = choice.provider == REFERENCE and self._overrides.get(choice.query.op) != REFERENCE
        if not fell or self.device.type == "cpu":
            log.debug("%s: %s%s", choice.query, choice.provider, _because(choice.rejected))
            return
        told = f"{choice.query} runs on the plain-torch reference on {self.device}{_because(choice.rejected)}"
        if self._strict:
            raise NoKernelError(
                f"{told}, and strict_ops is on. Install a kernel backend for "
                f"{self.device.type}, or set strict_ops=False",
                reasons=choice.rejected,
            )
        if not any(c.provider == REFERENCE and c.query.op == choice.query.op for c in self._choices.values()):
            log.warning("%s; it is correct and slow", told)


def _reasons(rejected: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in rejected.items()) or "none is installed"


def _because(rejected: Mapping[str, str]) -> str:
    return f" ({_reasons(rejected)})" if rejected else ""


def probe_backend(backend: KernelBackend, device: torch.device) -> Available | Unavailable:
    """Whether ``backend`` runs on ``device``; one whose probe raises does not, and why is logged."""
    try:
        answer = backend.probe(device)
        if not isinstance(answer, Available | Unavailable):
            raise TypeError(f"probe gave a {type(answer).__name__}, neither Available nor Unavailable")
        return answer
    except PLUGIN_ERRORS as error:
        return _failed(backend, device, error)


def _offers(backend: KernelBackend, device: torch.device) -> Mapping[str, Impl] | Unavailable:
    answer = probe_backend(backend, device)
    if isinstance(answer, Unavailable):
        return answer
    try:
        impls = backend.impls()
        if not isinstance(impls, Mapping):
            raise TypeError(f"impls gave a {type(impls).__name__}, not a mapping")
        _tell_unknown(backend.name, impls)
        return impls
    except PLUGIN_ERRORS as error:
        return _failed(backend, device, error)


def _tell_unknown(name: str, impls: Mapping[str, Impl]) -> None:
    unknown = unknown_ops(impls)
    if unknown:
        told = ", ".join(
            f"{op!r}{f' (did you mean {near!r}?)' if near else ''}" for op, near in unknown.items()
        )
        log.warning(
            "kernel backend %s offers ops that Kestrel does not know and never asks for: %s", name, told
        )


def _failed(backend: KernelBackend, device: torch.device, error: BaseException) -> Unavailable:
    """A backend is a plugin: whatever it raises, it alone is left out."""
    log.warning("kernel backend %s failed on %s", backend.name, device, exc_info=error)
    return Unavailable(f"failed ({type(error).__name__}: {error})")


def resolve_ops(
    needs: Iterable[OpQuery] = (),
    device: torch.device | None = None,
    backends: Sequence[KernelBackend] = (),
    overrides: Mapping[str, str] | None = None,
    strict: bool = False,
    kv_dtype: str = "auto",
    prefill_dtype: str = "auto",
) -> OpTable:
    """The table of ``device`` (default: CPU) with every query of ``needs`` resolved. ``kv_dtype`` and
    ``prefill_dtype``: as the table's.

    ``backends`` are probed here, highest priority first (ties by name). ``overrides`` maps an op to the provider
    to ask first; if that provider answers no, the usual order follows. Raises NoKernelError when an override names
    an op or provider that does not exist, when a need has no provider, and when ``strict`` and an accelerator
    would run a reference.
    """
    device = torch.device("cpu") if device is None else device
    providers: dict[str, Mapping[str, Impl]] = {}
    unavailable: dict[str, str] = {}
    for backend in sorted(backends, key=lambda b: (-b.priority, b.name)):
        offers = _offers(backend, device)
        if isinstance(offers, Unavailable):
            unavailable[backend.name] = offers.reason
        else:
            providers[backend.name] = offers
    known = {*providers, *unavailable, REFERENCE}
    names = {*OPS, *(op for impls in providers.values() for op in impls)}
    for op, provider in (overrides or {}).items():
        if op not in names:
            raise NoKernelError(f"ops={{{op!r}: {provider!r}}} names no op. {closest(op, names)}")
        if provider not in known:
            raise NoKernelError(f"ops={{{op!r}: {provider!r}}} names no provider. {closest(provider, known)}")
    table = OpTable(
        device=device,
        providers=providers,
        unavailable=unavailable,
        overrides=overrides or {},
        strict=strict,
        kv_dtype=kv_dtype,
        prefill_dtype=prefill_dtype,
    )
    for query in needs:
        table.resolve(query)
    return table
