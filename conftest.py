"""What every test of the workspace runs under: no network, two threads, the same examples each time."""

import os
import sys

from hypothesis import settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "2"
)  # as in CI; on tiny tensors more threads only wait for each other
os.environ["HF_HUB_OFFLINE"] = "1"

LOCAL_HOSTS = ("127.", "::1", "localhost")

settings.register_profile(
    "repeatable", deadline=None, derandomize=True
)  # a deadline would measure the machine
settings.load_profile("repeatable")


def refuse_network(event: str, args: tuple[object, ...]) -> None:
    """Raise when a test is about to leave this machine."""
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):  # a local socket's address is a path
        host = args[1][0]
    else:
        return
    text = host.decode() if isinstance(host, bytes) else host
    if text and not str(text).startswith(LOCAL_HOSTS):
        raise RuntimeError(f"a test asked the network for {text!r}; tests use local files and loopback only")


sys.addaudithook(refuse_network)
