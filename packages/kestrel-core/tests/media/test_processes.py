"""Pictures decoded in processes of their own: the same pixels and errors, and what happens when a process ends."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import EngineBusyError, EngineStoppedError, InvalidMediaError
from kestrel.media import DecoderProcesses, MediaLimits, NormalisedImage, normalise_image
from kestrel.media import processes as module
from kestrel.media.wire import send

LIMITS = MediaLimits()


def _encoded(kind: str, size: tuple[int, int] = (61, 40), **options: object) -> bytes:
    source = np.random.default_rng(3)
    pixels = source.integers(0, 256, (size[1], size[0], 4 if kind == "PNG" else 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return _encoded("JPEG", exif=exif)


@pytest.fixture(scope="module")
def processes() -> Iterator[DecoderProcesses]:
    found = DecoderProcesses(1)
    yield found
    found.close()


def _by(processes: DecoderProcesses, raw: bytes, limits: MediaLimits = LIMITS) -> NormalisedImage:
    return normalise_image(raw, limits, decode=processes.decode)


@pytest.mark.parametrize("raw", [_encoded("JPEG"), _encoded("PNG"), _encoded("WEBP"), _turned()])
def test_a_process_gives_the_same_picture(processes: DecoderProcesses, raw: bytes) -> None:
    here, there = normalise_image(raw, LIMITS), _by(processes, raw)
    np.testing.assert_array_equal(here.pixels, there.pixels)
    assert (here.warnings, here.original_size) == (there.warnings, there.original_size)
    assert there.pixels.flags.writeable


@pytest.mark.parametrize(
    "raw", [_encoded("JPEG")[:-600], b"no picture at all", _encoded("JPEG")[:20], _encoded("PNG")[:200]]
)
def test_a_bad_picture_has_the_same_error_and_the_process_goes_on(
    processes: DecoderProcesses, raw: bytes
) -> None:
    with pytest.raises(InvalidMediaError) as here:
        normalise_image(raw, LIMITS)
    before = processes.pids
    with pytest.raises(InvalidMediaError) as there:
        _by(processes, raw)
    assert str(here.value) == str(there.value)
    assert _by(processes, _encoded("JPEG")).original_size == (61, 40)
    assert not before or processes.pids == before


def test_limits_hold_in_a_process(processes: DecoderProcesses) -> None:
    limits = MediaLimits(max_image_pixels=100)
    with pytest.raises(InvalidMediaError, match="max_image_pixels is 100"):
        _by(processes, _encoded("JPEG"), limits)


def test_memory_is_asked_for_before_a_process_decodes(processes: DecoderProcesses) -> None:
    asked: list[int] = []

    def refuse(nbytes: int) -> None:
        asked.append(nbytes)
        raise EngineBusyError("full")

    raw = _encoded("JPEG")
    with pytest.raises(EngineBusyError, match="full"):
        normalise_image(raw, LIMITS, reserve=refuse, decode=processes.decode)
    assert asked == [61 * 40 * 7]
    assert _by(processes, raw).original_size == (61, 40)


def test_an_error_of_whoever_keeps_the_memory_is_no_end_of_the_process(processes: DecoderProcesses) -> None:
    def fails(nbytes: int) -> None:
        raise OSError("no budget")

    with pytest.raises(OSError, match="no budget"):
        normalise_image(_encoded("JPEG"), LIMITS, reserve=fails, decode=processes.decode)


def test_a_process_that_was_ended_is_replaced() -> None:
    processes = DecoderProcesses(1)
    raw = _encoded("JPEG")
    _by(processes, raw)
    (pid,) = processes.pids
    os.kill(pid, signal.SIGTERM)
    assert _by(processes, raw).original_size == (61, 40)
    assert processes.pids != (pid,)
    processes.close()


def test_processes_that_were_ended_between_pictures_cost_no_picture() -> None:
    processes = DecoderProcesses(3)
    raw = _encoded("JPEG")
    all_take = threading.Barrier(3)
    threads = [
        threading.Thread(target=lambda: processes.decode(raw, "it", LIMITS, lambda nbytes: all_take.wait(30)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    gone = processes.pids
    assert len(gone) == 3
    for pid in gone:
        os.kill(pid, signal.SIGTERM)
    assert not _left_of(gone)
    assert _by(processes, raw).original_size == (61, 40)
    assert not set(processes.pids) & set(gone)
    processes.close()


def test_a_picture_that_ends_its_processes_is_refused() -> None:
    processes = DecoderProcesses(1)

    def end_it(nbytes: int) -> None:
        for pid in processes.pids:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)

    with pytest.raises(InvalidMediaError, match="ended 2 processes"):
        normalise_image(_encoded("JPEG"), LIMITS, reserve=end_it, decode=processes.decode)
    assert not processes.pids
    processes.close()


def test_closing_ends_what_is_under_way() -> None:
    processes = DecoderProcesses(1)
    begun, ended = threading.Event(), list[type[BaseException]]()

    def wait(nbytes: int) -> None:
        begun.set()
        time.sleep(0.3)

    def decode() -> None:
        try:
            normalise_image(_encoded("JPEG"), LIMITS, reserve=wait, decode=processes.decode)
        except Exception as error:
            ended.append(type(error))

    threads = [threading.Thread(target=decode) for _ in range(2)]  # one of them waits for the other's process
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    processes.close()
    for thread in threads:
        thread.join(20)
    assert ended == [EngineStoppedError, EngineStoppedError]
    with pytest.raises(EngineStoppedError):
        _by(processes, _encoded("JPEG"))


def test_several_threads_share_few_processes() -> None:
    processes = DecoderProcesses(2)
    raw, found = _encoded("JPEG"), list[NormalisedImage]()
    threads = [threading.Thread(target=lambda: found.append(_by(processes, raw))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert len(processes.pids) <= 2
    processes.close()


@pytest.mark.parametrize("interpreter", ["/no/such/python", "", None, "echo no Python", "exec sleep 60"])
def test_without_processes_to_start_the_thread_decodes(
    interpreter: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if interpreter and " " in interpreter:
        if os.name != "posix":
            pytest.skip("a program of one line needs a shell")
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{interpreter}\n")
        program.chmod(0o755)
        interpreter = str(program)
        monkeypatch.setattr(module, "_START_S", 0.3)
    monkeypatch.setattr(sys, "executable", interpreter)
    processes = DecoderProcesses(1)
    for _ in range(2):
        assert _by(processes, _encoded("JPEG")).original_size == (61, 40)
    assert caplog.text.count("decoded on threads") == 1
    assert not processes.pids


def test_all_who_wait_for_a_process_that_does_not_start_decode_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    processes, found = DecoderProcesses(1), list[NormalisedImage]()
    threads = [
        threading.Thread(target=lambda: found.append(_by(processes, _encoded("JPEG")))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6


def test_a_frozen_program_is_not_started_anew_for_each_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    processes = DecoderProcesses(1)
    assert _by(processes, _encoded("JPEG")).original_size == (61, 40)
    assert not processes.pids


def test_processes_that_nobody_closed_end_with_what_started_them() -> None:
    processes = DecoderProcesses(1)
    _by(processes, _encoded("JPEG"))
    pids = processes.pids
    del processes
    gc.collect()
    assert not _left_of(pids)


def test_a_process_keeps_no_picture_that_it_has_answered() -> None:
    import weakref

    from kestrel.media import worker

    kept: list[weakref.ref[np.ndarray]] = []

    def decode(*args: object) -> NormalisedImage:
        image = NormalisedImage(pixels=np.zeros((4, 4, 3), np.uint8), original_size=(4, 4))
        kept.append(weakref.ref(image.pixels))
        return image

    class Requests(io.BytesIO):
        def read(self, *args: int) -> bytes:
            found = super().read(*args)
            assert found or kept[0]() is None, "it waits for the next picture, and holds the last one"
            return found

    requests = io.BytesIO()
    send(requests, {"label": "it", "max_image_pixels": 100}, b"encoded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "decode_image", decode)
        with pytest.raises(EOFError):
            worker.serve(Requests(requests.getvalue()), io.BytesIO())
    assert len(kept) == 1


def test_a_process_ends_when_its_engine_lets_go_of_it() -> None:
    import subprocess

    program = (
        "from kestrel.media import DecoderProcesses, MediaLimits\n"
        "import os, signal, sys\n"
        "d = DecoderProcesses(1)\n"
        "d.decode(sys.stdin.buffer.read(), 'it', MediaLimits(), lambda n: None)\n"
        "print(d.pids[0], flush=True)\n"
        "os._exit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=_encoded("JPEG"), stdout=subprocess.PIPE)
    assert not _left_of([int(done.stdout)])


def _left_of(pids: Iterable[int], within_s: float = 10.0) -> list[int]:
    """Which of ``pids`` still run when all have ended, or after ``within_s``."""
    end = time.monotonic() + within_s
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    """Whether ``pid`` does anything; ended ones whom nobody has asked about do not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except OSError:
        return False
