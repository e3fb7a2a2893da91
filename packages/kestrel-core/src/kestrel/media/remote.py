"""Fetches media by URL, where that is allowed, without being led into the private network.

Every hop resolves its host once, checks every address, and connects to an address that was checked, so a name that
changes between check and use gains nothing. Size and total time are bounded. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from kestrel.errors import InvalidMediaError
from kestrel.media.limits import MediaLimits

__all__ = ["Address", "Fetcher", "is_public", "resolve"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: IPv4 addresses, private ones too, inside IPv6
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}


def resolve(host: str, port: int) -> list[Address]:
    """Every address of ``host``, as the system resolves it. OSError when it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def is_public(address: Address) -> bool:
    """Whether ``address`` is on the public internet; addresses that wrap another are judged by what they wrap."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None or address in _NAT64:
            return False
    return address.is_global and not address.is_multicast


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """How hosts are resolved and which addresses may be connected to; replaced in tests."""

    resolve: Callable[[str, int], list[Address]] = resolve
    may_connect: Callable[[Address], bool] = is_public

    def fetch(self, url: str, limits: MediaLimits) -> bytes:
        """The body at ``url``. InvalidMediaError when fetching is off, refused, failed, too slow or too large."""
        deadline = time.monotonic() + limits.fetch_timeout_s
        for _ in range(limits.max_redirects + 1):
            target = _checked_url(url, limits)
            connection = self._connection(target, url, deadline)
            guard = threading.Timer(max(0.0, deadline - time.monotonic()), connection.abort)
            guard.daemon = True
            guard.start()
            try:
                status, location, body = _get(connection, target, limits)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, InvalidMediaError):
                    raise
                late = time.monotonic() >= deadline
                raise _failed(url, _too_slow(limits) if late else str(error)) from error
            finally:
                guard.cancel()
                connection.close()
            if connection.is_aborted:  # a body without a declared length just ends
                raise _failed(url, _too_slow(limits))
            if status == 200:
                return body
            if status not in _REDIRECTS or not location:
                raise InvalidMediaError(f"{url} answered with HTTP status {status}. Check the address")
            url = _next_hop(url, location)
        raise InvalidMediaError(
            f"more than {limits.max_redirects} redirects led to {url}. Give the final address"
        )

    def _connection(self, target: SplitResult, url: str, deadline: float) -> _Pinned:
        host = target.hostname or ""
        port = target.port or _PORTS[target.scheme]
        try:
            addresses = self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise InvalidMediaError(
                f"{url} cannot be fetched: {host} has no address. Check the address"
            ) from error
        refused = [address for address in addresses if not self.may_connect(address)]
        if refused or not addresses:
            raise InvalidMediaError(
                f"{url} cannot be fetched: {host} resolves to {refused[0] if refused else 'nothing'}, which is not a "
                "public address. Download the picture yourself and send its bytes"
            )
        timeout_s = max(0.001, deadline - time.monotonic())
        return _Pinned(host, port, addresses, timeout_s, secure=target.scheme == "https")


class _Pinned(http.client.HTTPConnection):
    """A connection to one of the checked addresses; the host's name stays in the Host header and in TLS."""

    def __init__(
        self, host: str, port: int, addresses: Sequence[Address], timeout_s: float, *, secure: bool
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        if secure:
            self.default_port = _PORTS["https"]
        self._addresses, self._timeout_s, self._secure = addresses, timeout_s, secure
        self.is_aborted = False
        # http.client forgets ``sock`` while a body is still being read.
        self._wire: socket.socket | None = None

    def connect(self) -> None:
        """Connect to a checked address, whatever the name resolves to by now."""
        self.sock = self._wire = self._reached()
        if self._secure:
            context = ssl.create_default_context()
            self.sock = self._wire = context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock.do_handshake()

    def _reached(self) -> socket.socket:
        """A socket to the first address that answers: a host may have addresses that this machine has no route to."""
        failure = OSError("no address")
        for address in self._addresses:
            try:
                return socket.create_connection((str(address), self.port), self._timeout_s)
            except OSError as error:
                failure = error
            if self.is_aborted:
                break
        raise failure

    def abort(self) -> None:
        """Make every pending read fail, from another thread."""
        self.is_aborted = True
        if self._wire is not None:
            try:  # the plain method: a TLS socket's own would pull its state from under the reader
                socket.socket.shutdown(self._wire, socket.SHUT_RDWR)
            except OSError:  # it is closed already
                return


def _failed(url: str, reason: str) -> InvalidMediaError:
    return InvalidMediaError(f"{url} cannot be fetched: {reason}. Check the address or retry")


def _too_slow(limits: MediaLimits) -> str:
    return f"it took longer than {limits.fetch_timeout_s:g} s"


def _get(connection: _Pinned, target: SplitResult, limits: MediaLimits) -> tuple[int, str | None, bytes]:
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    headers = {"Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "kestrel"}
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    if response.status != 200:
        return response.status, response.getheader("Location"), b""
    declared = response.getheader("Content-Length") or ""
    too_large = declared.isdecimal() and int(declared) > limits.max_media_bytes
    body = b"" if too_large else response.read(limits.max_media_bytes + 1)
    if too_large or len(body) > limits.max_media_bytes:
        raise InvalidMediaError(
            f"{target.geturl()} has more than {limits.max_media_bytes} bytes (max_media_bytes). Use a smaller picture"
        )
    if declared.isdecimal() and len(body) != int(declared):
        raise InvalidMediaError(f"{target.geturl()} ended after {len(body)} of {declared} bytes. Retry")
    return response.status, None, body


def _checked_url(url: str, limits: MediaLimits) -> SplitResult:
    if not limits.allowed_domains:
        raise InvalidMediaError(
            f"{url} is not fetched: remote media are off. Send the picture's bytes, or allow its host with "
            "allowed_media_domains"
        )
    try:
        target = urlsplit(url)
        host, _ = (target.hostname or "").rstrip(".").lower(), target.port
        "\n".join((target.path, target.query)).encode("ascii")
    except ValueError as error:  # a bad port or bracket, or characters that are not percent-encoded
        raise InvalidMediaError(f"{url!r} is not a valid address: {error}. Check it") from error
    if target.scheme not in _PORTS or not host or target.username is not None:
        raise InvalidMediaError(f"{url!r} is not an http(s) address without a user name. Check it")
    if not any(_covers(domain.lower(), host) for domain in limits.allowed_domains):
        allowed = ", ".join(limits.allowed_domains)
        raise InvalidMediaError(
            f"{host} is not one of the hosts that may be fetched from: {allowed}. "
            "Send the picture's bytes, or add the host to allowed_media_domains"
        )
    return target


def _covers(domain: str, host: str) -> bool:
    return domain in ("*", host) or (domain.startswith("*.") and host.endswith(domain[1:]))


def _next_hop(url: str, location: str) -> str:
    target = urljoin(url, location)
    if url.startswith("https:") and not target.startswith("https:"):
        raise InvalidMediaError(
            f"{url} redirects to an unencrypted address, {target}. Give a final https address"
        )
    return target
