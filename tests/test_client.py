"""The client against a scripted server: limits, connections, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvloop

from loadgen.address import connect_failure, parse_url, routes
from loadgen.client import Client, NoEndpointError
from loadgen.dialects import openai_chat
from loadgen.probe import describe, probe, sentence
from loadgen.types import Limits, NotReadyError, Outcome, Request, Seconds, Target, UserError
from tests.scripted import HELLO, OK_HEAD, always, answer, chunk_of, plain, serve, step_bytes

TLS = Path(__file__).parent / "data/tls"
SILENCE = {"action": "hold", "ms": 20_000}
KEY = "sk-very-secret-0123456789"


@asynccontextmanager
async def connected(url: str, limits: Limits | None = None, **options: Any) -> AsyncIterator[Client]:
    target = Target(url=url, verify_tls=options.pop("verify_tls", True))
    options = {"model": "m", "headers": {}, "connections": 8} | options
    client = Client(target, limits or Limits(), openai_chat, **options)
    try:
        yield client
    finally:
        await client.close()


async def ask(client: Client, body: bytes | None = None, **fields: Any) -> Outcome:
    request = Request("r", "c", [{"role": "user", "content": "hi"}], 16, **fields)
    return await client.send(request, body if body is not None else openai_chat.encode(request, "m", {}))


async def until(true: Callable[[], bool]) -> None:
    """Wait for what the server sees; the test's own time-out is the limit."""
    while not true():  # noqa: ASYNC110 it sees a server, not an event of ours
        await asyncio.sleep(0.002)


def outcome_of(
    steps: list[dict[str, Any]], limits: Limits | None = None, body: bytes | None = None, **options: Any
) -> Outcome:
    """One request to a server that answers so."""

    async def run() -> Outcome:
        async with serve(always(steps)) as server, connected(server.url, limits, **options) as client:
            return await ask(client, body)

    return uvloop.run(run())


def limits(**seconds: float) -> Limits:
    return Limits(**{name: Seconds(value) for name, value in seconds.items()})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_times_of_an_outcome_are_in_their_order() -> None:
    outcome = outcome_of(
        answer({"delay_ms": 20}, chunk_of(content="a"), chunk_of(content="b"), chunk_of(finish_reason="stop"))
    )
    times = [
        outcome.sent_ns,
        outcome.first_byte_ns,
        outcome.first_ns,
        outcome.first_output_ns,
        outcome.last_ns,
        outcome.done_ns,
    ]
    assert times == sorted(times, key=lambda at_ns: at_ns or 0)
    assert (outcome.outcome, outcome.text, outcome.chunks) == ("ok", "ab", 2)
    assert outcome.connect_ns
    assert outcome.queue_ns is not None


def test_connection_is_kept_for_the_next_request() -> None:
    async def run() -> None:
        async with serve(always(HELLO)) as server, connected(server.url) as client:
            first, second = await ask(client), await ask(client)
            assert (first.connect_ns is None, second.connect_ns is None) == (False, True)
            assert (server.connections, client.connections_opened, client.in_flight) == (1, 1, 0)
            assert client.last_token_ns == second.last_ns

    uvloop.run(run())


def test_request_carries_the_callers_headers_and_path() -> None:
    async def run() -> None:
        async with (
            serve(always(HELLO)) as server,
            connected(server.url + "/v1/", headers={"Authorization": f"Bearer {KEY}"}) as client,
        ):
            await ask(client)
            assert server.paths == ["/v1/chat/completions"]
            assert f"authorization: Bearer {KEY}" in server.heads[0]
            assert server.bodies[0].startswith(b"{")

    uvloop.run(run())


def test_requests_beyond_the_connections_wait_and_say_how_long() -> None:
    async def run() -> None:
        slow = answer({"delay_ms": 60}, chunk_of(content="x"), "data: [DONE]\n\n")
        async with serve(always(slow)) as server, connected(server.url, connections=1) as client:
            outcomes = await asyncio.gather(*(ask(client) for _ in range(3)))
            assert server.connections == 1
            assert [outcome.outcome for outcome in outcomes] == ["ok"] * 3
            assert sorted(int((outcome.queue_ns or 0) / 50e6) > 0 for outcome in outcomes) == [False, True, True]

    uvloop.run(run())


# Limits --------------------------------------------------------------------------------------------------------------

TOKENS_NEVER = answer(*[{"delay_ms": 20, "text": ":\n\n", "chunk": True}] * 200)
TOKENS_FOR_EVER = answer(*[{"delay_ms": 20, "text": chunk_of(content="x"), "chunk": True}] * 200)
ROLE_THEN_SILENCE = [*answer(chunk_of(role="assistant", content=""), end=False), SILENCE]


@pytest.mark.parametrize(
    ("steps", "given", "error_class"),
    [
        ([SILENCE], {"header_timeout": 0.1}, "header_timeout"),
        (ROLE_THEN_SILENCE, {"idle_timeout": 0.1}, "idle_timeout"),
        (ROLE_THEN_SILENCE, {"idle_timeout": 0.1, "progress_timeout": 0.1}, "idle_timeout"),
        (TOKENS_NEVER, {"progress_timeout": 0.2, "idle_timeout": 2}, "progress_timeout"),
        (TOKENS_FOR_EVER, {"timeout": 0.2}, "total_timeout"),
        ([SILENCE], {"timeout": 0.1}, "total_timeout"),
    ],
)  # fmt: skip
def test_each_limit_ends_the_request_with_its_name(
    steps: list[dict[str, Any]], given: dict[str, float], error_class: str
) -> None:
    started = time.monotonic()
    outcome = outcome_of(steps, limits(**given))
    assert (outcome.outcome, outcome.error_class) == ("failed", error_class)
    assert time.monotonic() - started < 3


def test_limit_closes_the_connection_so_that_the_server_stops() -> None:
    async def run() -> None:
        async with (
            serve(always(ROLE_THEN_SILENCE)) as server,
            connected(server.url, limits(idle_timeout=0.05)) as client,
        ):
            assert (await ask(client)).error_class == "idle_timeout"
            await until(lambda: not server.open)

    uvloop.run(run())


def test_tokens_hold_the_progress_limit_off() -> None:
    events = [{"delay_ms": 60, "text": chunk_of(content="x"), "chunk": True}] * 6
    assert outcome_of(answer(*events, "data: [DONE]\n\n"), limits(progress_timeout=0.25)).outcome == "ok"


def test_our_own_sleep_is_not_the_servers_silence() -> None:
    def serve_once(listener: socket.socket) -> None:  # in its own thread: it goes on while our loop stands still
        with listener, listener.accept()[0] as sock:
            sock.recv(65536)
            for n, step in enumerate(HELLO):
                time.sleep(0.05 * (n == 2))
                sock.sendall(step_bytes(step))
            sock.recv(1)

    async def run(port: int) -> None:
        async with connected(f"http://127.0.0.1:{port}", limits(idle_timeout=0.3)) as client:
            asked = asyncio.create_task(ask(client))
            await until(lambda: client.last_token_ns is not None)
            time.sleep(0.6)  # noqa: ASYNC251 longer than the limit, with all bytes waiting in the socket
            assert (await asked).outcome == "ok"

    listener = socket.create_server(("127.0.0.1", 0))
    server = threading.Thread(target=serve_once, args=(listener,))
    server.start()
    uvloop.run(run(listener.getsockname()[1]))
    server.join()


# What the server does to the connection ------------------------------------------------------------------------------


def test_kept_connection_that_proves_dead_is_replaced_once() -> None:
    for end in ("rst", "fin"):
        play = {"routes": {"*": [{"steps": HELLO, "if_reused": {"steps": [{"action": end}]}}]}}

        async def run(play: dict[str, Any] = play) -> None:
            async with serve(play) as server, connected(server.url) as client:
                assert (await ask(client)).outcome == "ok"
                second = await ask(client)
                assert second.outcome == "ok"
                assert "stale_connection_retry" in second.flags
                assert second.connect_ns is not None
                assert server.connections == 2

        uvloop.run(run())


def test_second_death_in_a_row_is_a_failure() -> None:
    async def run() -> None:
        play = {"routes": {"*": [{"steps": HELLO}, {"steps": [{"action": "rst"}]}]}}
        async with serve(play) as server, connected(server.url) as client:
            assert (await ask(client)).outcome == "ok"
            assert (await ask(client)).error_class == "connection_reset"
            assert server.connections == 2

    uvloop.run(run())


@pytest.mark.parametrize(
    ("steps", "error_class"),
    [
        ([{"action": "fin"}], "empty_response"),
        ([{"action": "rst"}], "connection_reset"),
        ([{"text": "HTTP/1.1 200 OK\r\nConte"}, {"action": "fin"}], "stream_truncated"),
        ([*answer(chunk_of(content="x"), end=False), {"action": "fin"}], "stream_truncated"),
        ([*answer(chunk_of(finish_reason="stop"), end=False), {"action": "fin"}], "stream_truncated"),
        ([{"text": "SSH-2.0-OpenSSH_9.2\r\n"}, SILENCE], "protocol_error"),
        ([{"text": OK_HEAD + "zz\r\n"}, SILENCE], "protocol_error"),
        (plain("200 OK", "xx", "Content-Encoding: br"), "unexpected_content_encoding"),
    ],
)  # fmt: skip
def test_broken_exchanges_have_their_names(steps: list[dict[str, Any]], error_class: str) -> None:
    assert outcome_of(steps).error_class == error_class


@pytest.mark.parametrize("ending", [{"action": "fin"}, {"action": "rst", "delay_ms": 20}, SILENCE])
def test_an_end_that_is_missing_after_done_costs_only_the_connection(ending: dict[str, Any]) -> None:
    events = answer(chunk_of(content="x"), chunk_of(finish_reason="stop"), "data: [DONE]\n\n", end=False)
    started = time.monotonic()
    outcome = outcome_of([*events, ending])
    assert (outcome.outcome, outcome.text) == ("ok", "x")
    assert "unterminated_body" in outcome.flags
    assert time.monotonic() - started < 3


def test_error_answer_leaves_the_connection_usable() -> None:
    async def run() -> None:
        refusal = plain("400 Bad Request", '{"error":"no"}')
        play = {"routes": {"*": [{"steps": refusal}, {"steps": HELLO}]}}
        async with serve(play) as server, connected(server.url) as client:
            assert (await ask(client)).error_class == "http_error"
            assert (await ask(client)).outcome == "ok"
            assert server.connections == 1

    uvloop.run(run())


def test_interim_answer_is_skipped() -> None:
    assert outcome_of([{"text": "HTTP/1.1 100 Continue\r\n\r\n"}, *HELLO]).text == "Hello"


# Connecting ----------------------------------------------------------------------------------------------------------


def unreachable(url: str, given: Limits | None = None, **options: Any) -> Outcome:
    async def run() -> Outcome:
        async with connected(url, given, **options) as client:
            return await ask(client)

    return uvloop.run(run())


def test_nobody_listening_is_refused() -> None:
    outcome = unreachable(f"http://127.0.0.1:{free_port()}")
    assert (outcome.error_class, outcome.sent_ns, outcome.http_status) == ("connect_refused", None, None)
    assert "refused" in (outcome.error_message or "")


def test_unknown_host_is_a_dns_error() -> None:
    assert unreachable("http://no-such-host.invalid:1", limits(connect_timeout=3)).error_class == "dns_error"


def test_full_backlog_is_a_connect_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert unreachable(url, limits(connect_timeout=0.3)).error_class == "connect_timeout"
        finally:
            for filler in fillers:
                filler.close()


def test_localhost_tries_every_address() -> None:
    async def run(host: str) -> str:
        async with serve(always(HELLO), host) as server, connected(f"http://localhost:{server.port}") as client:
            return (await ask(client)).outcome

    assert uvloop.run(run("127.0.0.1")) == "ok"


def test_ipv6_address_is_a_target() -> None:
    async def run() -> Outcome:
        async with serve(always(HELLO), "::1") as server, connected(server.url) as client:
            return await ask(client)

    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this machine")
    assert uvloop.run(run()).outcome == "ok"


def tls_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    return context


def test_tls_streams_and_a_certificate_that_nobody_signed_is_refused() -> None:
    async def run(verify: bool) -> Outcome:
        async with serve(always(HELLO), tls=tls_server()) as server, connected(server.url, verify_tls=verify) as client:
            return await ask(client, b"{" + b" " * 3_000_000 + b"}")

    assert uvloop.run(run(False)).text == "Hello"
    refused = uvloop.run(run(True))
    assert refused.error_class == "tls_error"
    assert "certificate" in (refused.error_message or "")


def test_tls_and_plain_ports_mixed_up_are_named() -> None:
    async def run(tls: bool) -> Outcome:
        async with serve(always(HELLO), tls=None if tls else tls_server()) as server:
            address = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
            async with connected(address, limits(connect_timeout=1, header_timeout=1)) as client:
                return await ask(client)

    assert uvloop.run(run(tls=True)).error_class in ("tls_error", "connect_timeout")
    assert uvloop.run(run(tls=False)).error_class in ("protocol_error", "empty_response", "connection_reset")


@pytest.mark.parametrize(
    ("number", "error_class", "word"),
    [
        (errno.EADDRNOTAVAIL, "client_resource", "ip_local_port_range"),
        (errno.EMFILE, "client_resource", "ulimit"),
        (errno.ECONNREFUSED, "connect_refused", "refused"),
        (errno.ETIMEDOUT, "connect_timeout", "timed out"),
        (errno.ECONNRESET, "connection_reset", "reset"),
        (errno.EHOSTUNREACH, "connect_refused", "route"),
    ],
)
def test_what_we_lack_ourselves_is_not_the_servers_failure(number: int, error_class: str, word: str) -> None:
    failure = connect_failure(OSError(number, os.strerror(number)), "h:1", False)
    assert failure.error_class == error_class
    assert word in str(failure)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h:1", "/v1/x"), ("h:1", "/v1/x"), ("http://h:1/v1", "/v1/x"), ("http://h:1/v1/", "/v1/x"),
        ("http://h:1/api", "/api/v1/x"), ("https://h/a/v1", "/a/v1/x"),
    ],
)  # fmt: skip
def test_url_may_end_in_v1_or_not(url: str, path: str) -> None:
    assert parse_url(url).path("/v1/x") == path


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port", "http://u:secret@h"])
def test_bad_url_is_the_users_error_and_shows_no_password(url: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_too_many_open_files_is_our_own_failure() -> None:
    async def run() -> Outcome:
        async with serve(always(HELLO)) as server, connected(server.url) as client:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            spare = os.dup(0)
            os.close(spare)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
                return await ask(client)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    outcome = uvloop.run(run())
    assert outcome.error_class == "client_resource"
    assert "ulimit" in (outcome.error_message or "")


def test_any_event_loop_will_do() -> None:
    async def run() -> None:
        async with serve(always(HELLO)) as server, connected(server.url) as client:
            assert (await ask(client, b" " * 3_000_000)).text == "Hello"
            assert (await ask(client)).connect_ns is None

    asyncio.run(run())


def test_header_that_cannot_be_sent_is_the_users_error() -> None:
    for value in ("a\nb", "中"):
        with pytest.raises(UserError, match="headers"):
            Client(Target(), Limits(), openai_chat, model="", headers={"x-a": value}, connections=1)


# Cutting, large bodies, floods ---------------------------------------------------------------------------------------


def test_abort_all_cuts_streams_waits_and_connects_alike() -> None:
    async def run() -> None:
        async with serve(always(ROLE_THEN_SILENCE)) as server, connected(server.url, connections=2) as client:
            tasks = [asyncio.create_task(ask(client)) for _ in range(5)]
            await until(lambda: len(server.paths) == 2)
            assert client.in_flight == 5
            client.abort_all()
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 2)
            assert {(o.outcome, o.error_class) for o in outcomes} == {("incomplete", "cancelled")}
            assert client.in_flight == 0
            late = asyncio.create_task(ask(client))
            await asyncio.sleep(0)
            client.abort_all()
            assert (await asyncio.wait_for(late, 2)).outcome == "incomplete"

    uvloop.run(run())


def test_cancelled_task_closes_its_connection() -> None:
    async def run() -> None:
        async with serve(always(ROLE_THEN_SILENCE)) as server, connected(server.url, connections=1) as client:
            for n in range(3):
                task = asyncio.create_task(ask(client))
                await until(lambda n=n: len(server.paths) > n)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: not server.open)
            assert client.in_flight == 0

    uvloop.run(run())


async def _lag(during: Callable[[], Awaitable[Outcome]]) -> tuple[Outcome, float]:
    """The longest time that the loop did not turn meanwhile."""
    worst, task = 0.0, asyncio.ensure_future(during())
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0)
        worst = max(worst, time.monotonic() - before)
    return await task, worst


def test_body_of_16_mb_leaves_in_small_turns_and_counts_as_sent_when_it_is() -> None:
    async def run() -> None:
        body = b"x" * 16_000_000
        async with serve(always(HELLO)) as server, connected(server.url) as client:
            begun = time.monotonic_ns()
            outcome, worst = await _lag(lambda: ask(client, body))
            assert outcome.outcome == "ok"
            assert len(server.bodies[0]) == 16_000_000
            assert (outcome.sent_ns or 0) - begun > 1_000_000
            assert worst < 0.5

    uvloop.run(run())


def test_server_that_does_not_read_the_request_is_an_idle_time_out() -> None:
    async def run() -> None:
        async with (
            serve(always([{"delay_ms": 5000}]), read_body=False) as server,
            connected(server.url, limits(idle_timeout=0.3)) as client,
        ):
            outcome = await ask(client, b"x" * 30_000_000)
            assert (outcome.error_class, outcome.sent_ns) == ("idle_timeout", None)

    uvloop.run(run())


def test_flood_is_decoded_in_slices_and_read_no_faster_than_decoded() -> None:
    async def run() -> None:
        events = {"repeat": {"text": chunk_of(content="word "), "times": 100_000}, "chunk": True}
        async with serve(always(answer(events, "data: [DONE]\n\n"))) as server, connected(server.url) as client:
            outcome, worst = await _lag(lambda: ask(client))
            assert (outcome.outcome, outcome.chunks) == ("ok", 100_000)
            assert "client_backlog" in outcome.flags
            assert worst < 0.5

    uvloop.run(run())


# Secrets and control calls -------------------------------------------------------------------------------------------


def test_key_is_in_no_message_and_no_repr() -> None:
    async def run() -> None:
        refusal = plain("401 Unauthorized", f'{{"error":{{"message":"bad key {KEY}"}}}}')
        async with (
            serve(always(refusal)) as server,
            connected(server.url, headers={"Authorization": f"Bearer {KEY}"}) as client,
        ):
            outcome = await ask(client)
            assert outcome.error_class == "unauthorized"
            assert KEY not in repr(outcome) + repr(client) + str(describe(outcome))
            with pytest.raises(UserError) as caught:
                await client.get_json("/v1/models")
            assert "401" in str(caught.value)
            assert KEY not in str(caught.value)

    uvloop.run(run())


def test_control_calls_return_what_the_server_says() -> None:
    async def run() -> None:
        routes = {"/v1/models": [{"steps": plain("200 OK", '{"data":[]}')}], "*": [{"steps": plain("200 OK", "a 1\n")}]}
        async with serve({"routes": routes}) as server, connected(server.url) as client:
            assert await client.get_json("/v1/models") == {"data": []}
            assert await client.get_text("/metrics", 2) == "a 1\n"
            assert await client.post_json("/v1/models", {"a": 1}) == {"data": []}
            assert server.bodies[-1] == b'{"a":1}'
            assert server.connections == 1

    uvloop.run(run())


@pytest.mark.parametrize(
    ("steps", "error", "word"),
    [
        (plain("200 OK", "<html>", "Content-Type: text/html"), NoEndpointError, "not JSON"),
        (plain("401 Unauthorized", "no"), UserError, "api_key"),
        (plain("404 Not Found", '{"detail":"Not Found"}'), NoEndpointError, "404"),
        (plain("503 Service Unavailable", "loading"), NotReadyError, "loading"),
        ([{"text": "SSH-2.0\r\n"}], UserError, "not HTTP"),
        ([{"action": "fin"}], NotReadyError, "without a byte"),
        ([SILENCE], NotReadyError, "not done after"),
    ],
)
def test_control_call_that_fails_says_why_in_one_line(
    steps: list[dict[str, Any]], error: type[UserError], word: str
) -> None:
    async def run() -> None:
        async with serve(always(steps)) as server, connected(server.url) as client:
            with pytest.raises(UserError, match=word) as caught:
                await client.get_json("/v1/models", 0.2)
            assert type(caught.value) is error
            assert "\n" not in str(caught.value)

    uvloop.run(run())


def test_refused_control_call_is_not_ready() -> None:
    async def run() -> None:
        async with connected(f"http://127.0.0.1:{free_port()}") as client:
            with pytest.raises(NotReadyError, match="refused"):
                await client.get_json("/v1/models")

    uvloop.run(run())


# The probe -----------------------------------------------------------------------------------------------------------

KEYS = (  # noqa: SIM905 as a list it would be 23 lines
    "outcome error_class error_message flags http_status retry_after_s finish_reason text reasoning_text tool_calls "
    "prompt_tokens cached_tokens output_tokens output_tokens_source reasoning_tokens connect_ms ttft_ms ttfo_ms "
    "last_token_ms stream_end_ms tpot_ms fails_at_ms chunks"
).split()


def probed(play: dict[str, Any], **options: Any) -> tuple[list[dict[str, Any]], list[str], list[bytes]]:
    given = {"model": "m", "prompt": "hi", "max_tokens": 4, "ignore_eos": False, "requests": 1, "concurrency": 1}

    async def run() -> tuple[list[dict[str, Any]], list[str], list[bytes]]:
        async with serve(play) as server:
            answers = probe(Target(url=server.url), Limits(), headers={}, **(given | options))
            return [found async for found in answers], server.paths, server.bodies

    return uvloop.run(run())


def test_probe_describes_with_the_documented_names_in_their_order() -> None:
    readme = (Path(__file__).parent.parent / "loadgen/dialects/README.md").read_text("utf-8")
    assert [row.split("`")[1] for row in readme.splitlines() if row.startswith("| `") and "probe:" in row] == KEYS
    for steps in (HELLO, [{"action": "fin"}], plain("500 Oops", "x")):
        (found,), _, _ = probed(always(steps))
        assert list(found) == KEYS
        assert (found["fails_at_ms"] is None) == (found["outcome"] == "ok")
        assert sentence(found).startswith(found["outcome"])


def test_probe_sends_as_many_as_asked_at_once() -> None:
    found, paths, _ = probed(always(HELLO), requests=7, concurrency=3)
    assert len(found) == len(paths) == 7


def test_probe_without_a_model_asks_for_one_only_when_the_server_insists() -> None:
    found, paths, bodies = probed(always(HELLO), model=None)
    assert (found[0]["outcome"], paths, b'"model"' in bodies[0]) == ("ok", ["/v1/chat/completions"], False)
    refusal = plain("404 Not Found", '{"error":{"message":"The model `` does not exist."}}')
    routes = {
        "/v1/models": [{"steps": plain("200 OK", '{"data":[{"id":"tiny"}]}')}],
        "*": [{"steps": refusal}, {"steps": HELLO}],
    }
    found, paths, bodies = probed({"routes": routes}, model=None)
    assert (found[0]["outcome"], len(paths), b'"model":"tiny"' in bodies[-1]) == ("ok", 3, True)


# Ways to a server ----------------------------------------------------------------------------------------------------


def reached(target: Target, play: dict[str, Any] | None = None, tls: ssl.SSLContext | None = None) -> Outcome:
    """One request to a server on loopback, its port put into the target's URL."""

    async def run() -> Outcome:
        async with serve(play or always(HELLO), tls=tls) as server:
            there = replace(target, url=f"{'https' if tls else 'http'}://127.0.0.1:{server.port}")
            client = Client(there, limits(connect_timeout=2), openai_chat, model="m", headers={}, connections=1)
            try:
                return await ask(client)
            finally:
                await client.close()

    return uvloop.run(run())


def test_certificate_of_an_own_ca_is_believed_when_it_is_named() -> None:
    outcome = reached(Target(ca_file=str(TLS / "cert.pem")), tls=tls_server())
    assert (outcome.outcome, outcome.times) == ("ok", "read")


def test_server_that_asks_for_our_certificate_gets_it() -> None:
    def asking() -> ssl.SSLContext:
        context = tls_server()
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(TLS / "cert.pem")
        return context

    own = Target(ca_file=str(TLS / "cert.pem"))
    shown = replace(own, client_cert=str(TLS / "cert.pem"), client_key=str(TLS / "key.pem"))
    assert reached(shown, tls=asking()).outcome == "ok"
    assert reached(own, tls=asking()).outcome == "failed"


@pytest.mark.parametrize(
    "fields", [{"ca_file": "/nowhere.pem"}, {"client_cert": "/nowhere.pem"}, {"client_key": "/nowhere.pem"}]
)
def test_certificate_file_that_is_none_is_the_users_error(fields: dict[str, str]) -> None:
    (name,) = fields
    with pytest.raises(UserError, match=name):
        routes(Target(url="https://h", **fields), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["unix://{}", "http+unix://{quoted}/v1"])
def test_unix_socket_is_a_target(form: str, tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def run() -> Outcome:
        async with serve(always(HELLO)) as server:

            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection("127.0.0.1", server.port)
                await asyncio.wait(
                    {asyncio.create_task(copied(reader, back)), asyncio.create_task(copied(there, writer))}
                )

            async with await asyncio.start_unix_server(carry, path):
                url = form.format(path, quoted=quote(str(path), safe=""))
                async with connected(url) as client:
                    outcome = await ask(client)
                    assert "host: localhost\r\n" in server.heads[0]
                    return outcome

    outcome = uvloop.run(run())
    assert (outcome.text, outcome.times) == ("Hello", "read")
    assert unreachable(f"unix://{tmp_path}/none").error_class == "connect_refused"


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@pytest.mark.parametrize("tls", [False, True])
def test_proxy_of_the_environment_is_used_when_asked_for_and_only_then(
    tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def run(target: Target) -> Outcome:
        async with serve(always(HELLO), tls=tls_server() if tls else None) as server:

            async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                asked.append(head)
                there, back = await asyncio.open_connection("127.0.0.1", server.port)
                if head.startswith("CONNECT"):
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:
                    back.write(head.encode())
                await asyncio.wait(
                    {asyncio.create_task(copied(reader, back)), asyncio.create_task(copied(there, writer))}
                )

            async with await asyncio.start_server(proxy, "127.0.0.1", 0) as listening:
                port = listening.sockets[0].getsockname()[1]
                monkeypatch.setenv("https_proxy" if tls else "http_proxy", f"http://me:pass%20word@127.0.0.1:{port}")
                url = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
                there = replace(target, url=url, ca_file=str(TLS / "cert.pem"))
                client = Client(there, limits(connect_timeout=2), openai_chat, model="m", headers={}, connections=1)
                outcome = await ask(client)
                await client.close()
                return outcome

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (uvloop.run(run(Target())).outcome, asked) == ("ok", [])
    assert uvloop.run(run(Target(proxy="env"))).text == "Hello"
    (head,) = asked
    assert head.startswith("CONNECT 127.0.0.1:" if tls else "POST http://127.0.0.1:")
    assert "proxy-authorization: basic bwu6cgfzcyb3b3jk\r\n" in head.lower()


@pytest.mark.parametrize(
    ("url", "environ", "host"),
    [
        ("http://a.b", {"http_proxy": "http://p:1"}, "p"),
        ("http://a.b", {"HTTP_PROXY": "p:1"}, "p"),
        ("http://a.b", {"HTTP_PROXY": "p:1", "REQUEST_METHOD": "GET"}, None),
        ("https://a.b", {"HTTPS_PROXY": "http://p:1", "http_proxy": "http://q:1"}, "p"),
        ("https://a.b", {"ALL_PROXY": "http://p:1"}, "p"),
        ("https://a.b", {}, None),
        ("http://a.b", {"http_proxy": "http://p:1", "no_proxy": "x, .b"}, None),
        ("http://a.b", {"http_proxy": "http://p:1", "NO_PROXY": "*"}, None),
        ("http://10.1.2.3", {"http_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}, None),
        ("http://ab", {"http_proxy": "http://p:1", "no_proxy": "b"}, "p"),
    ],
)
def test_proxies_are_read_as_curl_reads_them(url: str, environ: dict[str, str], host: str | None) -> None:
    (route,) = routes(Target(url=url, proxy="env"), environ)
    assert (route.proxy.host if route.proxy else None) == host


def test_proxy_that_we_do_not_speak_is_the_users_error() -> None:
    with pytest.raises(UserError, match="SOCKS"):
        routes(Target(url="http://a", proxy="env"), {"all_proxy": "socks5://me:secret@p"})


def test_requests_go_to_the_server_of_their_session() -> None:
    async def run() -> None:
        async with serve(always(HELLO)) as first, serve(always(HELLO)) as second:
            target = Target(urls=(first.url, second.url))
            client = Client(target, Limits(), openai_chat, model="m", headers={}, connections=4)
            request = Request("r", "c", [{"role": "user", "content": "hi"}], 16)
            servers = [
                (await client.send(replace(request, server=session), b"{}")).tags["server"]
                for session in (0, 1, 2, 1, 1)
            ]
            await client.close()
            assert servers == ["0", "1", "0", "1", "1"]
            assert (len(first.paths), len(second.paths)) == (2, 3)
            assert (first.connections, second.connections) == (1, 1)

    uvloop.run(run())
