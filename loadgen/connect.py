"""From a route to a connection: names, every address in turn, Unix sockets, TLS, tunnels through a proxy."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeAlias

from loadgen.address import ConnectError, Proxy, Route, connect_failure, reason
from loadgen.clock import now_ns
from loadgen.receive import Connection, KernelReader, KernelReaders, LoopReader, kernel_stamps

# A proxy's answer to CONNECT is a few lines; what is longer is none.
MAX_TUNNEL_BYTES = 16 * 1024

Found: TypeAlias = tuple[int, Any]  # address family, and what `connect` takes


async def connect(
    route: Route, timeout_s: float, opened: set[Connection], kernel: Callable[[], KernelReaders] | None
) -> Connection:
    """A connection that is ready for a request, in `opened` until it is gone. Raises ConnectError.

    Every address of a name is tried in turn (`localhost` may be ::1 first and 127.0.0.1 only be served). Plain TCP is
    given to `kernel`, unless that is None or the system has no receive times.
    """
    loop = asyncio.get_running_loop()
    deadline_ns = now_ns() + int(timeout_s * 1e9)
    where = route.address.authority if route.proxy is None else f"proxy {route.proxy.authority}"
    found = await _addresses(loop, route, timeout_s)
    failure: ConnectError | None = None
    for n, (family, address) in enumerate(found):
        left_s = max(0.001, (deadline_ns - now_ns()) / 1e9 / (len(found) - n))
        try:
            async with asyncio.timeout(left_s):
                return await _open(loop, route, family, address, opened, kernel)
        except TimeoutError:
            failure = ConnectError("connect_timeout", f"{where}: no connection within {timeout_s:g} s")
        except (OSError, ssl.CertificateError) as error:
            worse = connect_failure(error, where, route.tls is not None)
            if failure is None or worse.error_class != "connect_refused":
                failure = worse
    raise failure or ConnectError("dns_error", f"{where}: no address")


async def _addresses(loop: asyncio.AbstractEventLoop, route: Route, timeout_s: float) -> list[Found]:
    if route.address.socket is not None:
        return [(socket.AF_UNIX, route.address.socket)]
    host, port = (route.address.host, route.address.port)
    if route.proxy is not None:
        host, port = route.proxy.host, route.proxy.port
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise ConnectError("dns_error", f"{host}: no answer from the resolver") from None
    except (OSError, UnicodeError) as error:
        raise ConnectError("dns_error", f"{host}: {reason(error)}") from None
    return list(dict.fromkeys((int(entry[0]), entry[4]) for entry in found))


async def _open(
    loop: asyncio.AbstractEventLoop,
    route: Route,
    family: int,
    address: Any,
    opened: set[Connection],
    kernel: Callable[[], KernelReaders] | None,
) -> Connection:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
        if route.tls is not None and route.proxy is not None:
            await _tunnel(loop, sock, route.proxy, f"{route.address.host}:{route.address.port}")
        if kernel is not None and route.tls is None and family != socket.AF_UNIX and kernel_stamps(sock):
            return KernelReader(kernel(), sock, opened)
        _, reader = await loop.create_connection(
            lambda: LoopReader(loop, opened),
            sock=sock,
            ssl=route.tls,
            server_hostname=route.address.host if route.tls else None,
        )
    except BaseException:
        sock.close()
        raise
    return reader


async def _tunnel(loop: asyncio.AbstractEventLoop, sock: socket.socket, proxy: Proxy, to: str) -> None:
    """CONNECT (RFC 9110, 9.3.6): after a 200 the proxy only carries bytes."""
    key = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
    await loop.sock_sendall(sock, f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{key}\r\n".encode())
    said = b""
    while b"\r\n\r\n" not in said and len(said) < MAX_TUNNEL_BYTES:
        more = await loop.sock_recv(sock, MAX_TUNNEL_BYTES)
        if not more:
            break
        said += more
    status = said.split(b"\r\n", 1)[0].decode("latin-1")
    if status.split(" ")[1:2] != ["200"]:
        raise ConnectError("connect_refused", f"proxy {proxy.authority}: no tunnel to {to}: {status or 'closed'}")
