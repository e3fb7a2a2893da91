"""Programs that end, or fork, without a word to their engine. Each is a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

from kestrel.testing.engines import write_toy

START = """
import os, sys, threading, time
from kestrel.config import RuntimeConfig
from kestrel.engine import SyncEngine
from kestrel.errors import EngineStoppedError
from kestrel.testing.engines import ToyFamily, toy_host

family = ToyFamily()
engine = SyncEngine(RuntimeConfig(model_path=sys.argv[1], device="cpu"), plugins=toy_host(family))
ENDLESS = {"ignore_eos": True, "max_tokens": 1000}
"""
SLOW_STEPS = """
(controls,) = family.controls.values()
controls.delay_s = 0.01
"""


def ran(tmp_path, body, *, code=0):
    """What a program prints that has an engine and ends as ``body`` does."""
    program = START + textwrap.dedent(body)
    command = [sys.executable, "-c", program, str(write_toy(tmp_path / "toy"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


def test_a_program_may_exit_while_other_threads_wait(tmp_path):
    body = """
    def ask():
        try:
            engine.query(question="?", settings=ENDLESS)
        except EngineStoppedError:
            pass

    threading.Thread(target=ask, daemon=True).start()
    while not engine.stats()["toy"]["running"]:
        time.sleep(0.001)
    sys.exit(3)
    """
    ran(tmp_path, SLOW_STEPS + textwrap.dedent(body), code=3)


def test_a_program_may_exit_with_a_half_read_stream(tmp_path):
    body = """
    import atexit
    from kestrel.lanes import device_thread
    chunks = iter(engine.query(question="?", stream=True, settings=ENDLESS))
    next(chunks)
    device_threads_end = MARK
    if not device_threads_end:  # then the stream is still open when the interpreter closes it
        (controls,) = family.controls.values()
        controls.delay_s = 30.0
        time.sleep(0.1)
        atexit.unregister(device_thread._end_all)
    """
    for end in ("True", "False"):
        ran(tmp_path / end, SLOW_STEPS + textwrap.dedent(body).replace("MARK", end))


def test_device_threads_have_ended_when_the_interpreter_does(tmp_path):
    body = """
    import atexit
    from kestrel.lanes import device_thread
    stream = engine.query(question="?", stream=True, settings=ENDLESS)
    next(stream)
    atexit.unregister(device_thread._end_all)
    atexit.register(lambda: print([thread.is_alive for thread in device_thread._running]))
    atexit.register(device_thread._end_all)
    """
    assert ran(tmp_path, SLOW_STEPS + textwrap.dedent(body)) == "[False]\n"


def test_at_exit_an_engine_says_that_a_call_is_late_and_shuts_down(tmp_path):
    body = """
    import atexit
    def late():
        try:
            engine.query(question="?")
        except EngineStoppedError as error:
            print(error)
    atexit.register(lambda: print("down"))
    atexit.register(engine.shutdown)
    atexit.register(late)
    """
    said = ran(tmp_path, body)
    assert "before the program ends" in said
    assert said.endswith("down\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_process_is_told_to_make_its_own_engine(tmp_path):
    body = """
    pid = os.fork()
    if not pid:
        try:
            engine.query(question="?", settings={"timeout_s": 1})
        except EngineStoppedError as error:
            print(error, flush=True)
        engine.shutdown()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(engine.query(question="?").output["answer"][:3])
    """
    said = ran(tmp_path, body)
    assert "Create an engine in each process" in said
    assert said.endswith("abc\n")
