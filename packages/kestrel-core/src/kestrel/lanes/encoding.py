"""The encode stage: media features and cross entries, one encoder launch per tick, each item once."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from kestrel.errors import KestrelError
from kestrel.lanes.faults import fault
from kestrel.lanes.hold import feature_key
from kestrel.lanes.sequence import Sequence
from kestrel.plan import EncodeItem, plan_encode
from kestrel.runner import Runner
from kestrel.spi.driver import TokenSpec
from kestrel.state import FeaturePool, Features, Lease
from kestrel.types import Prepared

__all__ = ["EncodeStage", "Encoded"]


@dataclass(slots=True)
class _Job:
    """One item to encode: for a place in the pool, or for the cross entry of a lease."""

    item: Prepared
    features: Features | None = None
    lease: Lease | None = None
    waiters: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Encoded:
    """What a tick's encoder launch did: items encoded, and sequences that cannot go on."""

    items: int = 0
    failed: list[tuple[Sequence, KestrelError]] = field(default_factory=list)


class EncodeStage:
    """Feeds the encoder with what prefilling sequences need, in their order. ``alone``: one item per launch, so that
    its features do not depend on who else shows one (deterministic mode)."""

    def __init__(
        self, runner: Runner, pool: FeaturePool | None, spec: TokenSpec, *, alone: bool = False
    ) -> None:
        self._runner, self._pool = runner, pool
        self._max_cost = {media.kind: 0 if alone else media.max_cost for media in spec.media}

    def advance(self, prefilling: Items[Sequence]) -> Encoded:
        """Make at most one encoder launch for ``prefilling``, the first in line first."""
        needy = [seq for seq in prefilling if seq.media is not None and seq.media.needs_encoder]
        if not needy:
            return Encoded()
        self._acquire(needy)
        jobs = self._jobs(needy)
        picked = plan_encode(
            [EncodeItem(key, job.item.kind, job.item.cost) for key, job in jobs.items()], self._max_cost
        )
        made = [jobs[item.key] for item in picked]
        if made and made[0].lease is not None:  # of equal items few sizes of launches make few programs
            made = made[: 1 << (len(made).bit_length() - 1)]
        return self._run(made) if made else Encoded()

    def _acquire(self, needy: list[Sequence]) -> None:
        """Hold places in order; the first in line takes them back from the last when the pool is full."""
        pool = self._pool
        if pool is None:
            return
        for index, seq in enumerate(needy):
            assert seq.media is not None
            if seq.media.acquire(pool):
                continue
            for other in reversed(needy[1:]) if index == 0 else ():
                assert other.media is not None
                other.media.revoke(pool)
                if seq.media.acquire(pool):
                    break
            return

    def _jobs(self, needy: list[Sequence]) -> dict[Hashable, _Job]:
        jobs: dict[Hashable, _Job] = {}
        for seq in needy:
            hold = seq.media
            assert hold is not None
            if hold.cross is not None:
                if seq.held_lease.cross_len:  # another sequence had it written
                    hold.cross = None
                else:
                    key: Hashable = ("cross", seq.held_lease.keys.namespace)
                    job = jobs.setdefault(key, _Job(hold.cross, lease=seq.held_lease))
                    job.waiters.append(seq)
            for features, item in hold.unwritten():
                job = jobs.setdefault(feature_key(item), _Job(item, features=features))
                job.waiters.append(seq)
        return jobs

    def _run(self, jobs: list[_Job]) -> Encoded:
        """One launch for ``jobs``; where that fails one for each, so that no item fails for another."""
        try:
            self._launch(jobs)
        except Exception as error:
            if len(jobs) == 1:
                what = f"the encoder failed on {jobs[0].item.kind}"
                return Encoded(0, [(seq, fault(seq.id, what, error)) for seq in jobs[0].waiters])
            made = [self._run([job]) for job in jobs]
            failed = {seq.id: (seq, raised) for one in made for seq, raised in one.failed}
            return Encoded(sum(one.items for one in made), list(failed.values()))
        return Encoded(len(jobs))

    def _launch(self, jobs: list[_Job]) -> None:
        places = [job for job in jobs if job.features is not None]
        entries = [job for job in jobs if job.lease is not None]
        if places:
            self._encode(places)
        if entries:
            leases = [job.lease for job in entries if job.lease is not None]
            self._runner.write_cross([job.item for job in entries], leases)
        for job in entries:
            for seq in job.waiters:
                assert seq.media is not None
                seq.media.cross = None

    def _encode(self, jobs: list[_Job]) -> None:
        assert self._pool is not None
        x_RC = self._runner.encode(jobs[0].item.kind, [job.item for job in jobs])
        start = 0
        for job in jobs:
            assert job.features is not None
            self._pool.write(job.features, x_RC[start : start + job.features.rows])
            start += job.features.rows
        assert start == x_RC.shape[0], f"the encoder gave {x_RC.shape[0]} rows for {start} positions"

    def barrier(self, seq: Sequence) -> int:
        """The first position of ``seq`` that cannot be computed yet."""
        return 2**62 if seq.media is None else seq.media.barrier

    def passed(self, seq: Sequence, position: int) -> None:
        """A launch computed ``seq`` up to ``position``."""
        if seq.media is not None and self._pool is not None:
            seq.media.passed(position, self._pool)

    def drop(self, seq: Sequence) -> None:
        """``seq`` left its row."""
        if seq.media is not None and self._pool is not None:
            seq.media.drop(self._pool)
        seq.media = None
