"""The command line in this process: every mistake is one line on stderr and the code that the help promises."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import disks
import pytest

from loadgen import cli, live, scenario
from loadgen.rules import __path__ as rules_path


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(list(argv))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers every connection with the same bytes."""
    answer: bytes = request.param
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    connection.recv(65536)
                    connection.sendall(answer)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def http(status: str, body: str, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return (head + body).encode()


@pytest.mark.parametrize(
    ("argv", "code", "say"),
    [
        (["run"], 3, "Missing argument"),
        (["run", "smoke", "--no-such-flag"], 3, "No such option"),
        (["no-such-command"], 3, "No such command"),
        (["run", "smok"], 3, 'did you mean "smoke"?'),
        (["run", "smoke", "--url", "localhost:8000"], 3, "not a URL"),
        (["run", "smoke", "--url", "http://127.0.0.1:1"], 75, "connection refused"),
        (["run", "smoke", "--url", "http://no-such-host.invalid"], 3, "no-such-host.invalid"),
        (["run", "smoke", "--sim", "tiny", "--url", "http://x"], 3, "say one of them"),
        (["run", "smoke", "--sim-args", "x"], 3, "needs --sim"),
        (["run", "smoke", "--sim", "tyny"], 3, 'no preset "tyny"'),
        (["run", "smoke", "--sim", "tiny", "--duration", "900000000h"], 3, "MiB are free there; this run needs"),
        (
            ["run", "smoke", "--sim", "tiny", "--set", "monitors={docker: {required: true, socket: /no/docker.sock}}"],
            3,
            "docker: the container engine cannot be asked",
        ),
        (["run", "smoke", "--duration", "soon"], 3, "--duration: expected a duration"),
        (["run", "smoke", "--set", "x"], 3, "key=value"),
        (["run", "smoke", "--api-key-env", "NO_SUCH_VARIABLE_HERE"], 3, "NO_SUCH_VARIABLE_HERE is not set"),
        (["run", "smoke", "--out", "/proc/nowhere", "--url", "http://127.0.0.1:1"], 3, "--out /proc/nowhere"),
        (["judge", "/nowhere"], 3, "not a run folder"),
        (["watch", "/nowhere"], 3, "not a run folder"),
        (["list", "ruls"], 3, 'did you mean "rules"?'),
        (["probe", "ftp://x"], 3, "not a URL"),
        (["probe", "http://127.0.0.1:1", "--max-tokens", "0"], 3, "--max-tokens"),
        (["validate", "nothing.yaml"], 3, "no such file"),
    ],
)
def test_a_users_mistake_is_told_in_a_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], code: int, say: str
) -> None:
    if argv[0] == "run" and "--out" not in argv:
        argv = [*argv, "--out", str(tmp_path)]
    got, _, err = call(capsys, *argv)
    assert got == code, err
    assert say in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "nothing is left of a run that never began"


VLLM_404 = '{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}'
MODELS = '{"object":"list","data":[{"id":"alpha"},{"id":"beta"}]}'


@pytest.mark.parametrize(
    ("answering", "argv", "code", "say"),
    [
        (http("200 OK", "<html>hello</html>", "text/html"), [], 3, "not JSON"),
        (http("200 OK", '{"hello": 1}'), [], 3, "not an OpenAI-compatible server"),
        (http("404 Not Found", '{"detail":"Not Found"}'), [], 3, "OpenAI-compatible"),
        (http("401 Unauthorized", '{"error":"Unauthorized"}'), [], 3, "401"),
        (http("503 Service Unavailable", '{"error":{"message":"Loading model"}}'), [], 75, "Loading model"),
        (http("200 OK", MODELS), [], 3, "alpha, beta: say --model"),
        (http("200 OK", MODELS), ["--model", "alpa"], 3, 'did you mean "alpha"?'),
        (http("404 Not Found", VLLM_404), ["--model", "x"], 3, "does not exist"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", [], 3, ""),
    ],
    indirect=["answering"],
)
def test_a_server_that_is_not_what_was_said_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, answering: str, argv: list[str], code: int, say: str
) -> None:
    got, _, err = call(capsys, "run", "smoke", "--url", answering, "--out", str(tmp_path), *argv)
    assert got == code, err
    assert say in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answering", [http("200 OK", MODELS)], indirect=True)
def test_https_to_a_server_without_tls_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, answering: str
) -> None:
    url = answering.replace("http://", "https://")
    code, _, err = call(capsys, "run", "smoke", "--url", url, "--out", str(tmp_path))
    assert code == 3, err
    assert "TLS" in err
    assert err.count("\n") == 1


@pytest.mark.root
def test_a_full_disk_is_refused_before_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with disks.tiny(tmp_path / "disk") as out:
        code, _, err = call(capsys, "run", "smoke", "--url", "http://127.0.0.1:1", "--out", str(out))
    assert code == 3, err
    assert "free there" in err


def test_a_port_that_is_taken_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = call(capsys, "sim", "--preset", "tiny", "--port", str(taken.getsockname()[1]))
    assert code == 3, err
    assert "taken" in err or "in use" in err
    assert "Traceback" not in err


def test_the_exit_codes_stand_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    text = " ".join(out.split())
    for word in ("0 PASS", "1 FAIL", "2 INCONCLUSIVE", "3 usage", "75", "130/143"):
        assert word in text


def test_version_schema_list_and_validate_answer_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--version")
    assert (code, out.split()[0]) == (0, "loadgen")
    code, out, _ = call(capsys, "schema")
    assert json.loads(out)["$defs"]["Scenario"]["properties"]["concurrency"] == {"type": "integer"}
    code, out, _ = call(capsys, "list")
    assert code == 0
    for name in ("soak-600s", "chat_short", "needle", "kernel", "drift", "openai_chat"):
        assert f"  {name} " in out
    code, out, _ = call(capsys, "validate", "soak-600s", "--duration", "60s")
    assert code == 0
    assert "long_context" in out
    assert "cannot reach their minimum" in out


def test_probe_prints_one_object_per_request_and_says_by_its_code_how_it_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, "probe", "http://127.0.0.1:1", "--json", "--requests", "3")
    assert code == 1
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["error_class"] for line in lines] == ["connect_refused"] * 3


def test_probe_cuts_a_request_and_tells_when_the_server_has_noticed(
    capsys: pytest.CaptureFixture[str], sim_url: str
) -> None:
    code, out, err = call(capsys, "probe", sim_url, "--cancel-after", "300ms", "--max-tokens", "2000", "--json")
    assert code == 0, err
    seen = json.loads(out)
    assert seen["running_during"] == seen["running_before"] + 1
    assert 0 < seen["cancel_seen_ms"] < 5000


def test_credentials_and_paths_are_gone_from_the_kept_command_line() -> None:
    argv = [
        "run",
        "--url",
        "http://me:pw@127.0.0.1:8000",
        "--set",
        "target.headers.api_key=abc",
        "--out",
        "/home/me/runs",
    ]
    kept = " ".join(cli._redacted(argv))
    for secret in ("me:pw", "abc", "/home/me"):
        assert secret not in kept
    assert "127.0.0.1:8000" in kept


def test_every_rule_file_is_listed() -> None:
    files = {p.stem for folder in rules_path for p in Path(folder).glob("*.py")} - {"__init__"}
    assert files == set(cli.plugins.names("rules"))


# -- the live view -----------------------------------------------------------------------------------------------------


def append(path: Path, *records: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def progress_of(folder: Path) -> live.Progress:
    ms = 1_000_000
    append(
        folder / "journal.jsonl",
        {"schema": "loadgen.journal/1"},
        {"at": 0, "event": "phase_start", "phase": "measure", "kind": "measure", "concurrency": 4, "duration_s": 60},
        {"at": 5, "event": "class_left_out", "cls": "json", "why": "model cannot"},
    )
    ok = {"cls": "chat", "outcome": "ok", "due_ns": 0, "sent_ns": ms, "first_ns": 21 * ms, "output_tokens": 30}
    append(
        folder / "outcomes-0.jsonl",
        {"schema": "loadgen.outcomes/1"},
        {**ok, "done_ns": 900 * ms},
        {**ok, "done_ns": 950 * ms, "grade": {"ok": False}},
        {"cls": "chat", "outcome": "failed", "error_class": "connection_reset", "due_ns": 0, "done_ns": 990 * ms},
    )
    append(
        folder / "samples-fast.jsonl",
        {"at": 1, "monitor": "host", "values": {"mem_available_bytes": [1 << 30, 3 << 30, 2 << 30, 10]}},
        {"at": 2, "monitor": "kernel", "metric": "oom_kill_memcg", "value": 1, "text": "Killed process 7"},
    )
    progress = live.Progress(folder)
    progress.look()
    return progress


def test_the_live_view_shows_what_the_files_say(tmp_path: Path) -> None:
    progress = progress_of(tmp_path)
    text = live.line(progress, 1_000_000_000)
    assert "measure, 0:59 left" in text
    assert "2 done, 1 failed" in text
    assert "2.0 tokens/s" in text
    assert "available 2.0 GiB (low 1.0)" in text
    about = progress.classes["chat"]
    assert (about.done, about.failed, about.wrong) == (2, 1, 1)
    assert 19_900 <= (about.ttft.quantile(0.5) or 0) <= 20_100
    told = " ".join(event for _, event in progress.events)
    for word in ("json left out: model cannot", "chat failed: connection_reset", "kernel: oom_kill_memcg"):
        assert word in told


def test_the_live_view_reads_each_line_once_and_waits_for_its_end(tmp_path: Path) -> None:
    progress = progress_of(tmp_path)
    path = tmp_path / "outcomes-0.jsonl"
    with path.open("a") as file:
        file.write('{"cls": "chat", "outcome": "ok", "due_ns"')
        file.flush()
        progress.look()
        assert progress.classes["chat"].done == 2
        file.write(": 0}\n")
        file.flush()
    progress.look()
    progress.look()
    assert progress.classes["chat"].done == 3


def test_every_class_of_the_standard_soak_has_a_weight() -> None:
    assert sum(scenario.mixed_weights(scenario.load("soak-600s").classes).values()) == 100


def test_every_server_of_the_target_is_asked_before_the_run(
    capsys: pytest.CaptureFixture[str], sim_url: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    out = str(tmp_path)
    code, _, err = call(capsys, "run", "smoke", "--url", sim_url, "--url", dead, "--model", "sim-tiny", "--out", out)
    assert code == 75
    assert dead in err
    assert sim_url not in err
