"""Remote pictures: off by default, and never a way into the private network."""

import ipaddress
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import pytest
from PIL import Image

from kestrel.errors import InvalidMediaError
from kestrel.media import Fetcher, MediaLimits, normalise_image
from kestrel.media.remote import is_public

LOOPBACK = ipaddress.ip_address("127.0.0.1")
HOSTS = {
    "pictures.test": ["127.0.0.1"],
    "inside.test": ["10.0.0.5"],
    "both.test": ["127.0.0.1", "192.168.1.1"],
}


def picture() -> bytes:
    file = BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"]))
        port = self.server.server_port
        redirects = {
            "/moved": "/picture.png",
            "/into": f"http://inside.test:{port}/picture.png",
            "/outside": f"http://elsewhere.test:{port}/picture.png",
            "/loop": "/loop",
            "/file": "file:///etc/passwd",
        }
        if self.path in redirects:
            self.send_response(302)
            self.send_header("Location", redirects[self.path])
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/short":
            self.answer(picture(), declared=10_000)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(100_000))
        elif self.path.startswith("/picture.png"):
            self.answer(picture())
        elif self.path == "/page":
            self.answer(b"<html></html>")
        else:
            self.send_error(404)

    def answer(self, body: bytes, declared: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(declared or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client gave up, as it should
            return

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(host, port):
    if host not in HOSTS:
        raise OSError("no such host")
    return [ipaddress.ip_address(address) for address in HOSTS[host]]


FETCHER = Fetcher(resolve=resolve, may_connect=lambda address: address == LOOPBACK)


@pytest.fixture
def fetch(server):
    def fetch(path, host="pictures.test", domains=("pictures.test", "inside.test", "both.test"), **limits):
        limits = MediaLimits(allowed_domains=domains, **limits)
        return normalise_image(f"http://{host}:{server.server_port}{path}", limits, fetcher=FETCHER)

    return fetch


def test_allowed_picture_is_fetched_from_the_checked_address_under_its_own_name(fetch, server):
    found = fetch("/picture.png?size=1")
    assert found.pixels.shape == (2, 3, 3)
    assert server.seen == [("/picture.png?size=1", f"pictures.test:{server.server_port}")]


def test_an_address_that_cannot_be_reached_leaves_the_next_one(server):
    addresses = [ipaddress.ip_address("::1"), LOOPBACK]  # nobody listens at the first
    fetcher = Fetcher(resolve=lambda host, port: addresses, may_connect=lambda address: address.is_loopback)
    limits = MediaLimits(allowed_domains=("pictures.test",))
    found = normalise_image(f"http://pictures.test:{server.server_port}/picture.png", limits, fetcher=fetcher)
    assert found.pixels.shape == (2, 3, 3)


def test_redirect_is_followed(fetch, server):
    assert fetch("/moved").pixels.shape == (2, 3, 3)
    assert [path for path, _ in server.seen] == ["/moved", "/picture.png"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/into", "inside.test resolves to 10.0.0.5, which is not a public address"),
        ("/outside", "elsewhere.test is not one of the hosts"),
        ("/loop", "more than 5 redirects"),
        ("/file", "not an http"),
        ("/absent", "HTTP status 404"),
        ("/short", "ended after|IncompleteRead"),
        ("/page", "is not a picture: SVG, HTML"),
    ],
)
def test_bad_answers_are_refused(fetch, path, text):
    with pytest.raises(InvalidMediaError, match=text):
        fetch(path)


def test_host_with_any_private_address_is_refused_without_a_connection(fetch, server):
    for host in ("inside.test", "both.test"):
        with pytest.raises(InvalidMediaError, match="not a public address"):
            fetch("/picture.png", host=host)
    assert server.seen == []


def test_size_is_bounded_whatever_the_server_declares(fetch):
    for path in ("/endless", "/short"):
        with pytest.raises(InvalidMediaError, match="max_media_bytes"):
            fetch(path, max_media_bytes=1000)


def test_time_is_bounded_even_when_bytes_trickle(fetch):
    start = time.perf_counter()
    with pytest.raises(InvalidMediaError, match=r"longer than 0\.3 s"):
        fetch("/slow", fetch_timeout_s=0.3)
    assert time.perf_counter() - start < 2


def test_https_is_spoken_and_a_server_that_does_not_is_refused(server):
    limits = MediaLimits(allowed_domains=("*",), fetch_timeout_s=5)
    with pytest.raises(InvalidMediaError, match="cannot be fetched"):
        normalise_image(f"https://pictures.test:{server.server_port}/picture.png", limits, fetcher=FETCHER)
    assert server.seen == []


def test_nothing_is_fetched_by_default():
    def unreachable(host, port):
        raise AssertionError("resolved a name")

    with pytest.raises(InvalidMediaError, match="allowed_media_domains"):
        normalise_image("https://pictures.test/a.png", MediaLimits(), fetcher=Fetcher(resolve=unreachable))


@pytest.mark.parametrize(
    ("domains", "host", "is_allowed"),
    [
        (("pictures.test",), "pictures.test", True),
        (("Pictures.Test",), "PICTURES.test", True),
        (("*.test",), "pictures.test", True),
        (("*",), "pictures.test", True),
        (("test",), "pictures.test", False),
        (("*.pictures.test",), "pictures.test", False),
        (("ictures.test",), "pictures.test", False),
    ],
)
def test_hosts_are_allowed_by_name_or_below_a_domain(fetch, domains, host, is_allowed):
    if is_allowed:
        assert fetch("/picture.png", host=host, domains=domains).pixels.shape == (2, 3, 3)
    else:
        with pytest.raises(InvalidMediaError, match="is not one of the hosts"):
            fetch("/picture.png", host=host, domains=domains)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@pictures.test/a.png",
        "http:///a.png",
        "http://pictures.test:99999/a.png",
        "http://[::1/a.png",
        "http://pictures.test/a b\r\nX: y",
        "http://pictures.test/ä.png",
        "http://nowhere.test/a.png",
    ],
)
def test_bad_addresses_are_refused(url):
    with pytest.raises(InvalidMediaError):
        normalise_image(url, MediaLimits(allowed_domains=("*",)), fetcher=FETCHER)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
    ],
)
def test_private_and_special_addresses_are_told_from_public_ones(address, expected):
    assert is_public(ipaddress.ip_address(address)) is expected
