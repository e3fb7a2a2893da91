"""How a lane's events reach the event loop: each token at once to those who watch, many together to those who wait."""

import asyncio

import pytest

from kestrel.engine.router import GATHERED, WOKEN_TOGETHER, Router
from kestrel.lanes import Failed, Finished, TokensReady
from kestrel.types import Token


class Listener:
    """A work's side of a router, and the batches of ids that reached it."""

    def __init__(self, router, *, is_watched):
        self.batches = []
        self.receiver = router.open(lambda _: None, self.take, is_watched=is_watched)
        self.id = self.receiver.work_id

    def take(self, tokens):
        self.batches.append([token.id for token in tokens])


def token(work_id, token_id):
    return TokensReady(work_id, [Token(token_id)])


async def test_tokens_come_at_once_to_those_who_watch_and_together_to_those_who_wait():
    router = Router(asyncio.get_running_loop())
    watching, waiting = Listener(router, is_watched=True), Listener(router, is_watched=False)
    count = 2 * GATHERED + 2
    for i in range(count):
        router.deliver([token(watching.id, i), token(waiting.id, i)])
    await asyncio.sleep(0)
    assert watching.batches == [[i] for i in range(count)]
    assert waiting.batches == [list(range(GATHERED)), list(range(GATHERED, 2 * GATHERED))]
    assert waiting.receiver.num_tokens == count


async def test_works_that_run_side_by_side_are_read_in_turns():
    router = Router(asyncio.get_running_loop())
    waiting = [Listener(router, is_watched=False) for _ in range(4 * GATHERED)]
    reads = []
    for i in range(3 * GATHERED):
        before = sum(len(listener.batches) for listener in waiting)
        router.deliver([token(listener.id, i) for listener in waiting])
        await asyncio.sleep(0)
        reads.append(sum(len(listener.batches) for listener in waiting) - before)
    assert max(reads) <= WOKEN_TOGETHER
    for listener in waiting:
        whole = [i for batch in listener.batches for i in batch]
        assert whole == list(range(len(whole)))
        assert len(listener.batches) in (2, 3)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_was_held_comes_before_the_end(fails):
    router = Router(asyncio.get_running_loop())
    waiting = Listener(router, is_watched=False)
    for i in range(3):
        router.deliver([token(waiting.id, i)])
    error = RuntimeError("lost")
    end = (
        Failed(work_id=waiting.id, error=error)
        if fails
        else Finished(work_id=waiting.id, finish_reason="stop")
    )
    router.deliver([end])
    result = await asyncio.gather(waiting.receiver.done, return_exceptions=True)
    assert waiting.batches == [[0, 1, 2]]
    assert result == [error if fails else end]


async def test_frames_and_durations_are_gathered_with_their_tokens():
    router = Router(asyncio.get_running_loop())
    waiting = Listener(router, is_watched=False)
    for i in range(3):
        router.deliver([TokensReady(waiting.id, [Token(i)], (10 + i,), (1,))])
    router.deliver([Finished(work_id=waiting.id, finish_reason="stop")])
    await waiting.receiver.done
    assert waiting.receiver.frames == [10, 11, 12]
    assert waiting.receiver.durations == [1, 1, 1]


async def test_events_of_a_closed_receiver_wake_nobody():
    loop = asyncio.get_running_loop()
    router = Router(loop)
    waiting, watching = Listener(router, is_watched=False), Listener(router, is_watched=True)
    router.close(waiting.receiver)
    router.close(watching.receiver)
    router.deliver([token(waiting.id, 1), token(watching.id, 1)])
    await asyncio.sleep(0)
    assert waiting.batches == watching.batches == []
