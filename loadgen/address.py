"""Where the target is, by which way it is reached, and whose fault it is when there is no connection."""

from __future__ import annotations

import base64
import errno
import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from loadgen.types import Target, UserError

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
    """The parts of the target's URL, and the path before a dialect's own. `socket` is the path of a Unix socket."""

    tls: bool
    host: str
    port: int
    prefix: str
    authority: str
    socket: str | None = None

    def path(self, path: str) -> str:
        """`http://host/v1` is as common a base as `http://host`; a path's own `/v1` is not repeated behind it."""
        if not path.startswith("/"):
            path = "/" + path
        if self.prefix.endswith("/v1") and path.startswith("/v1/"):
            path = path[3:]
        return self.prefix + path


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; `authorization` is the value of Proxy-Authorization, a secret."""

    host: str
    port: int
    authority: str
    authorization: str | None


@dataclass(frozen=True, slots=True)
class Route:
    """How one server is reached: its address, TLS to it, and the proxy on the way."""

    address: Address
    tls: ssl.SSLContext | None = None
    proxy: Proxy | None = None

    def line(self, path: str) -> str:
        """What stands in the request line: a proxy is told the whole address, unless it only tunnels."""
        path = self.address.path(path)
        return f"http://{self.address.authority}{path}" if self.proxy is not None and self.tls is None else path

    def headers(self) -> dict[str, str]:
        """Headers for the way there."""
        proxy = self.proxy if self.tls is None else None
        own = {"proxy-authorization": proxy.authorization} if proxy is not None and proxy.authorization else {}
        return {"host": self.address.authority, **own}


def routes(target: Target, environ: Mapping[str, str]) -> list[Route]:
    """One per server of the target; `environ` is asked for proxies only where the target says so. Raises UserError."""
    addresses = [parse_url(url) for url in target.urls or (target.url,)]
    tls = tls_context(target) if any(address.tls for address in addresses) else None
    return [
        Route(
            address,
            tls if address.tls else None,
            proxy_of(address, environ) if target.proxy == "env" and address.socket is None else None,
        )
        for address in addresses
    ]


def parse_url(url: str) -> Address:
    """Raises UserError with the reason."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme == "unix" and not parts.netloc and len(parts.path) > 1:
        return Address(False, "localhost", 0, "", "localhost", parts.path)
    if parts.scheme == "http+unix" and parts.netloc:  # as Docker's and Python's clients write it
        return Address(False, "localhost", 0, parts.path.rstrip("/"), "localhost", unquote(parts.netloc))
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"url {url!r}: expected http://HOST:PORT, https://HOST:PORT or unix:///PATH/TO.SOCKET")
    if parts.username or parts.password:
        raise UserError("url: put credentials into `api_key` or `headers`, not into the address")
    tls = parts.scheme == "https"
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port in (None, 443 if tls else 80) else f"{shown}:{port}"
    return Address(tls, host, port or (443 if tls else 80), parts.path.rstrip("/"), authority)


def tls_context(target: Target) -> ssl.SSLContext:
    """As the target wants it: its CA beside the system's, its client certificate, its check or none. Raises
    UserError."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if not target.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if target.ca_file is not None:
        try:
            context.load_verify_locations(target.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"ca_file {target.ca_file}: no PEM file of certificates ({reason(error)})") from None
    if target.client_key is not None and target.client_cert is None:
        raise UserError("client_key: a key alone is of no use; say where `client_cert` is")
    if target.client_cert is not None:
        try:
            context.load_cert_chain(target.client_cert, target.client_key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            where = target.client_cert if target.client_key is None else f"{target.client_cert} + {target.client_key}"
            raise UserError(f"client_cert {where}: no certificate with its key ({reason(error)})") from None
    return context


def _no_password() -> str:
    raise UserError("client_key: it is encrypted; give a key without a pass phrase (openssl pkey -in KEY -out PLAIN)")


def proxy_of(address: Address, environ: Mapping[str, str]) -> Proxy | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY name for an address, as curl reads them: lower
    case first, and HTTP_PROXY in upper case not at all where a web server may have set it. Raises UserError."""

    def said(name: str) -> str:
        return environ.get(name) or environ.get(name.upper(), "")

    if _bypassed(address.host, said("no_proxy")):
        return None
    if address.tls:
        url = said("https_proxy")
    else:
        url = environ.get("http_proxy") or ("" if "REQUEST_METHOD" in environ else environ.get("HTTP_PROXY", ""))
    url = url or said("all_proxy")
    if not url:
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if parts.scheme != "http" or not host:
        raise UserError("the proxy of the environment: expected http://HOST:PORT (no SOCKS, no TLS to the proxy)")
    authorization = None
    if parts.username is not None:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(credentials.encode()).decode()
    return Proxy(host, port, f"{host}:{port}", authorization)


def _bypassed(host: str, no_proxy: str) -> bool:
    for word in no_proxy.replace(",", " ").split():
        name = word.lower().removeprefix("*").lstrip(".")
        if word == "*" or host.lower() == name or (name and host.lower().endswith("." + name)):
            return True
        try:
            if "/" in word and ipaddress.ip_address(host) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:
            continue
    return False


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
