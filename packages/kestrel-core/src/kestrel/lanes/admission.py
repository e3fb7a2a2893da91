"""From the queue to a row: order, siblings, leases, and what to do when nothing is left."""

from __future__ import annotations

from kestrel.errors import CapacityError
from kestrel.lanes.board import Board
from kestrel.lanes.faults import own_error
from kestrel.lanes.hold import MediaHold
from kestrel.lanes.intake import Intake
from kestrel.lanes.sequence import Phase, Sequence
from kestrel.plan import Siblings, WaitQueue
from kestrel.state import Lease
from kestrel.types import Prepared

__all__ = ["Admission"]


class Admission:
    """Waiting sequences of a token lane.

    ``budget``: positions of a launch. ``head_start``: output positions reserved with the prompt.
    ``holds_siblings``: the prefix cache is on, so copies of a prompt wait.
    """

    def __init__(
        self, board: Board, intake: Intake[Sequence], *, budget: int, head_start: int, holds_siblings: bool
    ) -> None:
        self._board, self._intake, self._budget = board, intake, budget
        self._head_start, self._holds_siblings = head_start, holds_siblings
        self._queue: WaitQueue[Sequence] = WaitQueue()
        self._siblings = Siblings()
        self._bare: list[Sequence] = []  # admitted, not equipped
        board.on_end = self._ended

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, seq: Sequence) -> None:
        """A submitted sequence waits, or is held until the prompt that it shares is cached."""
        work = seq.work
        seq.shares_prompt = self._holds_siblings and work.group is not None and work.n_siblings > 1
        if seq.shares_prompt and not self._siblings.join(work.group, seq.id):
            seq.phase = Phase.HELD
            return
        self._push(seq)

    def requeue(self, seq: Sequence) -> None:
        """A preempted sequence waits again, in its old place."""
        self._intake.returned()
        self._push(seq)

    def prompt_cached(self, seq: Sequence) -> None:
        """The prompt of ``seq`` has been computed: its siblings may come."""
        if seq.shares_prompt:
            self._release(self._siblings.prompt_cached(seq.work.group))

    def admit(self, now: float) -> None:
        """Give rows and leases to waiting sequences, in order, until one of them finds no room, or the next launch is
        full: a device that waits for it does not wait for those behind."""
        board = self._board
        board.room = True
        ready = sum(map(self._runnable, board.prefilling))
        while ready < self._budget and board.has_row and (seq := self._queue.peek()) is not None:
            if seq.keys is None:
                seq.keys = seq.work.keys.fork()
            head = min(seq.limit - len(seq.tokens), self._head_start)
            lease = board.cache.open(seq.keys, limit=self._limit(seq), reserve=seq.known + head - 1)
            if lease is None:
                if not board.is_still:
                    board.room = False
                    return
                board.fail(seq, _never(seq), now)
                continue
            self._queue.pop()
            self._intake.left_queue()
            self._start(seq, lease, now)
            if seq.phase is Phase.PREFILL:
                ready += self._runnable(seq)

    def _start(self, seq: Sequence, lease: Lease, now: float) -> None:
        if seq.admitted_at is None:
            seq.admitted_at = now
            seq.cached = min(lease.cached, seq.prompt_len)
        self._board.start(seq, lease)
        self._bare.append(seq)
        try:
            seq.media = MediaHold.of(seq.work.layout, lease.cached, self._cross(seq, lease))
        except Exception as error:  # its prompt: nobody else is concerned
            self._board.fail(seq, own_error(seq.id, "it could not start", error), now)

    def equip(self, now: float) -> None:
        """Write the rows of who was admitted, before anything but an encoder is launched for them."""
        bare, self._bare = self._bare, []
        for seq in bare:
            if seq.phase is Phase.PREFILL:
                try:
                    self._board.equip(seq)
                except Exception as error:  # its parameters or grammar, as above
                    self._board.fail(seq, own_error(seq.id, "it could not start", error), now)

    def _runnable(self, seq: Sequence) -> int:
        """Positions that the next launch could compute."""
        return max(0, min(seq.known, self._board.encoder.barrier(seq)) - seq.scheduled)

    def _limit(self, seq: Sequence) -> int | None:
        """Positions that may come from the cache: a probe's hidden state has to be computed."""
        open_probes = [at for i, (at, _) in enumerate(seq.work.probes) if i not in seq.probes]
        return min(open_probes, default=None)

    def _cross(self, seq: Sequence, lease: Lease) -> Prepared | None:
        """The cross-attention item of ``seq`` when its entry is still to be written."""
        states = self._board.runner.states
        if not states.cross or not lease.cross_entry(states.cross[0])[1]:
            return None
        spanned = {span.item for span in seq.work.layout.spans}
        return next(item for i, item in enumerate(seq.work.layout.media) if i not in spanned)

    def _push(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        work = seq.work
        self._queue.push(seq.id, seq, priority=work.priority, submitted=work.submitted, arrival=seq.arrival)
        self._board.room = True

    def _release(self, members: list[int]) -> None:
        for member in members:
            self._push(self._board.sequences[member])

    def _ended(self, seq: Sequence) -> None:
        if seq.phase is Phase.WAITING:
            self._queue.remove(seq.id)
            self._board.room = True
        if seq.phase in (Phase.WAITING, Phase.HELD):
            self._intake.left_queue()
        if seq.shares_prompt:
            self._release(self._siblings.leave(seq.work.group, seq.id))


def _never(seq: Sequence) -> CapacityError:
    return CapacityError(
        f"work {seq.id} needs {seq.known} positions and found no room although nothing else runs. "
        "Raise kv_cache_bytes, or shorten the request."
    )
