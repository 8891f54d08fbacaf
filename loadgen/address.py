"""Where the target is, how to speak TLS to it, and whose fault it is when there is no connection."""

from __future__ import annotations

import errno
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadgen.types import UserError

OWN_ERRNOS = {
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "the system's table of open files is full",
    errno.EADDRNOTAVAIL: "no free local port; widen net.ipv4.ip_local_port_range, or let the server keep connections",
    errno.ENOBUFS: "no buffer space for sockets",
    errno.ENOMEM: "out of memory for sockets",
}


class ConnectError(Exception):
    """There is no connection: error class and message."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of the target's URL, and the path before a dialect's own."""

    tls: bool
    host: str
    port: int
    prefix: str
    authority: str

    def path(self, path: str) -> str:
        """`http://host/v1` is as common a base as `http://host`; a path's own `/v1` is not repeated behind it."""
        if not path.startswith("/"):
            path = "/" + path
        if self.prefix.endswith("/v1") and path.startswith("/v1/"):
            path = path[3:]
        return self.prefix + path


def parse_url(url: str) -> Address:
    """Raises UserError with the reason."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password:
        raise UserError("url: put credentials into `api_key` or `headers`, not into the address")
    tls = parts.scheme == "https"
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port in (None, 443 if tls else 80) else f"{shown}:{port}"
    return Address(tls, host, port or (443 if tls else 80), parts.path.rstrip("/"), authority)


def tls_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def connect_failure(error: OSError, where: str, tls: bool) -> ConnectError:
    """Whose fault it is that there is no connection."""
    if error.errno in OWN_ERRNOS:
        return ConnectError("client_resource", f"{where}: {OWN_ERRNOS[error.errno]}")
    if isinstance(error, ssl.SSLError):  # certificate errors are among them
        hint = "; does it speak plain http://?" if "WRONG_VERSION" in str(error) or "RECORD" in str(error) else ""
        return ConnectError("tls_error", f"{where}: TLS failed: {reason(error)}{hint}")
    if isinstance(error, ConnectionRefusedError):
        return ConnectError("connect_refused", f"{where}: connection refused; is the server running there?")
    if error.errno == errno.ETIMEDOUT:
        return ConnectError("connect_timeout", f"{where}: connection timed out")
    if isinstance(error, ConnectionError):
        word = "tls_error" if tls else "connection_reset"
        return ConnectError(
            word, f"{where}: closed during {'the TLS handshake' if tls else 'connect'}: {reason(error)}"
        )
    return ConnectError("connect_refused", f"{where}: {reason(error)}")


def reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", text)
