"""The command line: parses, calls, prints, exits. Exit codes are those of the table in `loadgen --help`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadgen import __version__, child, clock, live, plugins, scenario, strict
from loadgen.address import parse_url
from loadgen.types import Limits, Scenario, Seconds, Secret, Target, UserError, Verdict

EPILOG = (
    "Exit codes: 0 PASS · 1 FAIL · 2 INCONCLUSIVE · 3 usage, configuration or a fault of ours · "
    "75 the target is not ready or busy · 130/143 interrupted by SIGINT/SIGTERM."
)
# Plain progress lines where there is no terminal.
LINE_EVERY_NS = 10_000_000_000
# Redraws a second: enough to see a number move, too few to cost anything.
REDRAWS_PER_S = 4
SIM_START_S = 20.0
# How wide a diagnosis is where there is no terminal: it is pasted into an issue.
DOCTOR_COLUMNS = 100
# Headers whose values may not stand in a run folder.
SECRET_NAME = re.compile(r"auth|key|token|secret|cookie", re.IGNORECASE)

app = typer.Typer(
    name="loadgen",
    help="Soak testing of LLM inference servers: does it stay up, fast and right under your load?",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True, highlight=False)
plain = Console(highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> None:
    """Entry point. A user's mistake is one line and code 3, whoever found it: we or the parser."""
    try:
        code = app(argv, standalone_mode=False)
    except UserError as error:
        errors.print(f"loadgen: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if not hasattr(error, "show"):  # the parser's own errors know how to show themselves
            raise
        error.show()
        sys.exit(UserError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _version(wanted: bool) -> None:
    if wanted:
        plain.print(f"loadgen {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------------------
# run


Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help="The server: http://127.0.0.1:8000, https://…, unix:///PATH. Repeatable: sessions go round the servers.",
    ),
]
CaFile = Annotated[
    Path | None, typer.Option("--ca-file", help="PEM file of a CA that signed the server's certificate.")
]
ClientCert = Annotated[
    Path | None, typer.Option("--client-cert", help="PEM file of our certificate, if it is asked for.")
]
ClientKey = Annotated[Path | None, typer.Option("--client-key", help="Its key, if that is in a file of its own.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")]
ProxyFromEnv = Annotated[
    bool, typer.Option("--proxy-from-env", help="Use the proxies of HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY.")
]
Model = Annotated[str | None, typer.Option("--model", help="The model to ask; default: the only one served.")]
Dialect = Annotated[
    str | None,
    typer.Option("--dialect", help="The API to speak, see `loadgen list dialects`; default: openai_chat."),
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="'NAME: VALUE'", help="One more header of every request. Repeatable."),
]
ExtraBody = Annotated[
    str | None, typer.Option("--extra-body", metavar="JSON", help="More fields of every request's body; they override.")
]
KeyEnv = Annotated[str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. phases.measure.duration=2h. Repeatable."),
]
ScenarioName = Annotated[str, typer.Argument(help="A scenario's name (see `loadgen list scenarios`) or a YAML file.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]


@app.command()
def run(
    name: ScenarioName,
    url: Urls = None,
    model: Model = None,
    dialect: Dialect = None,
    api_key_env: KeyEnv = None,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    insecure: Insecure = False,
    proxy_from_env: ProxyFromEnv = False,
    header: Headers = None,
    extra_body: ExtraBody = None,
    duration: Annotated[str | None, typer.Option(help="Length of the measuring phases: 60s, 10m, 8h.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Seats: how many requests are always in flight.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same mix, order and prompts.")] = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Where the run folder goes.")] = Path("runs"),
    sim: Annotated[
        str | None, typer.Option(metavar="PRESET", help="Test the embedded simulated server instead of a real one.")
    ] = None,
    sim_args: Annotated[
        str, typer.Option(metavar="TEXT", help="More for the simulator, e.g. '--faults F.yaml --time-scale 20'.")
    ] = "",
    wait: Annotated[str, typer.Option(help="How long to wait for a server that is not ready yet.")] = "0s",
    allow_busy: Annotated[bool, typer.Option(help="Run even if others use the server.")] = False,
    no_guard: Annotated[
        bool, typer.Option("--no-guard", help="Go on whatever the memory of the server's host does.")
    ] = False,
    shards: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Engine processes that share the seats; auto: one per 256 seats, while a core is left for the rest.",
        ),
    ] = "1",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run the shards on a Ray cluster, spread over its nodes (HOST:PORT, or local to try it out).",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")] = False,
) -> None:
    """Run a scenario against a server and judge it."""
    overrides = [*(sets or [])]
    overrides += [f"concurrency={concurrency}"] if concurrency is not None else []
    overrides += [f"seed={seed}"] if seed is not None else []
    if sim is not None and url is not None:
        raise UserError("--sim and --url: say one of them")
    if sim_args and sim is None:
        raise UserError("--sim-args needs --sim PRESET")
    scene = scenario.load(name, overrides, _duration("--duration", duration))
    target = _asking(_target(scene.target, url, model, api_key_env), dialect, header, extra_body)
    target = _reached(target, ca_file, client_cert, client_key, insecure, proxy_from_env)
    for line in header or []:
        if SECRET_NAME.search(line.partition(":")[0]):
            raise UserError(f"--header {line.partition(':')[0]}: it would stand in the run folder; use --api-key-env")
    if no_guard:
        scene = replace(scene, guards=replace(scene.guards, enabled=False))
    wait_s = _duration("--wait", wait) or Seconds(0)
    count = _shards(shards)
    with _simulator(sim, sim_args) as sim_url:
        if sim_url is not None:
            target = replace(target, url=sim_url, urls=(), model=None)
        code = _run(replace(scene, target=target), out, wait_s, allow_busy, count, ray, quiet)
    raise typer.Exit(code)


def _run(
    scene: Scenario, out: Path, wait_s: float, busy_ok: bool, shards: int | None, ray: str | None, quiet: bool
) -> int:
    from loadgen import supervise  # brings the client and numpy: half a second that --help need not wait for

    argv = _redacted(sys.argv[1:])
    plan = supervise.Plan(out, shards=shards, ray=ray, wait_s=wait_s, busy_ok=busy_ok, argv=argv)
    with _view(scene.name, quiet) as view:
        folder, verdict = supervise.run(scene, plan, view)
    _print_result(folder, verdict)
    return verdict.exit_code


def _print_result(folder: Path, verdict: Verdict) -> None:
    from loadgen import report

    plain.print(report.block_of(folder), markup=False)
    plain.print(f"\nrun folder: {folder}", markup=False)
    plain.print(f"read it:    {folder / 'report.md'}", markup=False)
    plain.print(f"judge again, offline: loadgen judge {folder}", markup=False)
    style = {"PASS": "bold green", "FAIL": "bold red"}.get(verdict.overall, "bold yellow")
    plain.print(Text(f"VERDICT: {verdict.line}", style))


def _target(target: Target, urls: list[str] | None, model: str | None, api_key_env: str | None) -> Target:
    if urls:
        checked = tuple(map(_checked_url, urls))
        target = replace(target, url=checked[0], urls=checked if len(checked) > 1 else ())
    if model is not None:
        target = replace(target, model=model)
    if api_key_env is not None:
        target = replace(target, api_key=Secret(env=api_key_env))
    return target


def _reached(
    target: Target, ca_file: Path | None, cert: Path | None, key: Path | None, insecure: bool, proxy_from_env: bool
) -> Target:
    """The target, reached as these options say."""

    def full(given: Path | None, known: str | None) -> str | None:
        return known if given is None else str(given.absolute())  # a shard runs elsewhere

    target = replace(
        target,
        ca_file=full(ca_file, target.ca_file),
        client_cert=full(cert, target.client_cert),
        client_key=full(key, target.client_key),
    )
    if insecure:
        target = replace(target, verify_tls=False)
    return replace(target, proxy="env") if proxy_from_env else target


def _asking(target: Target, dialect: str | None, headers: list[str] | None, extra_body: str | None) -> Target:
    """The target, asked as these options say."""
    if dialect is not None:
        plugins.load("dialects", dialect)
        target = replace(target, dialect=dialect, endpoint=None)
    for line in headers or []:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise UserError("--header: write it like 'Name: value'")
        target = replace(target, headers={**target.headers, name.strip(): value.strip()})
    if extra_body is not None:
        try:
            more = orjson.loads(extra_body)
        except orjson.JSONDecodeError as error:
            raise UserError(f"--extra-body: not JSON ({error})") from None
        if not isinstance(more, dict):
            raise UserError("""--extra-body: write an object, like '{"top_k": 1}'""")
        target = replace(target, extra_body={**target.extra_body, **more})
    return target


def _checked_url(url: str) -> str:
    """The server's base address: scheme and host must stand, a trailing /v1 is what people paste."""
    if re.match(r"(http\+)?unix://", url):
        parse_url(url)
        return url
    if not re.match(r"https?://[^/\s]+", url):
        raise UserError(f"{url}: not a URL of a server; write it like http://127.0.0.1:8000")
    return re.sub(r"(/v1)?/*$", "", url)


def _shards(text: str) -> int | None:
    """None for `auto`."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--shards {text}: write a number from 1 up, or auto")
    return int(text)


def _duration(flag: str, text: str | None) -> Seconds | None:
    if text is None:
        return None
    try:
        return strict.seconds(text)
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from None


def _redacted(argv: list[str]) -> list[str]:
    """The command line as it may stand in a file: credentials are gone, and so is where files lie."""
    words = [re.sub(r"(?i)(//)[^/@\s]+@|((?:authorization|key|token)[^=:]*[=:]).*", r"\1\2…", word) for word in argv]
    return [re.sub(r"(?<![\w:/.])/\S*/", "…/", word) for word in words]


class _Screen:
    """The run on a terminal: one table, redrawn."""

    def __init__(self, title: str, screen: Live) -> None:
        self.title, self.screen = title, screen

    def say(self, text: str) -> None:
        self.screen.console.print(text, markup=False)

    def show(self, progress: live.Progress) -> None:
        self.screen.update(live.table(progress, self.title, clock.now_ns()))


class _Lines:
    """The run in a log: a line every ten seconds, and every piece of news."""

    def __init__(self) -> None:
        self.last_ns = clock.now_ns()
        self.phase = ""

    def say(self, text: str) -> None:
        errors.print(text, markup=False, soft_wrap=True)

    def show(self, progress: live.Progress) -> None:
        now = clock.now_ns()
        if now - self.last_ns >= LINE_EVERY_NS or progress.phase != self.phase:
            self.last_ns, self.phase = now, progress.phase
            self.say(live.line(progress, now))


class _Silence:
    def say(self, text: str) -> None:
        pass

    def show(self, progress: live.Progress) -> None:
        pass


@contextmanager
def _view(title: str, quiet: bool) -> Iterator[_Screen | _Lines | _Silence]:
    if quiet:
        yield _Silence()
    elif errors.is_terminal:
        with Live(console=errors, refresh_per_second=REDRAWS_PER_S, transient=True) as screen:
            yield _Screen(title, screen)
    else:
        yield _Lines()


@contextmanager
def _simulator(preset: str | None, more: str) -> Iterator[str | None]:
    """The embedded server as a process of its own for the length of a run; its address, or None without a preset."""
    if preset is None:
        yield None
        return
    args = ["--preset", preset, "--port", "0", "--supervised", *shlex.split(more)]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen.sim", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        # no server of ours outlives a run that was killed, but it serves what the shards still drain
        preexec_fn=partial(child.die_with_parent, signal.SIGHUP),
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        address = re.search(r"http://\S+", first)
        if address is None:
            assert process.stderr is not None
            said = process.stderr.read().strip().removeprefix("loadgen: ")
            raise UserError(said.splitlines()[-1] if said else "the simulated server did not start")
        yield address[0]
    finally:
        child.end([process], SIM_START_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


# ---------------------------------------------------------------------------------------------------------------------
# What needs no server


@app.command()
def judge(folder: RunFolder) -> None:
    """Judge a run folder again, offline, with the rules of this version."""
    from loadgen import verdict

    if not (folder / "journal.jsonl").is_file():
        raise UserError(f"{folder}: not a run folder (no journal.jsonl in it)")
    result = verdict.judge(folder)
    _print_result(folder, result)
    raise typer.Exit(result.exit_code)


@app.command()
def watch(folder: RunFolder) -> None:
    """Show the live view of a run that goes on in another terminal; Ctrl-C leaves the run alone."""
    if not (folder / "journal.jsonl").is_file():
        raise UserError(f"{folder}: not a run folder (no journal.jsonl in it)")
    from loadgen import supervise

    with _view(folder.name, quiet=False) as view:
        supervise.follow(folder, view)


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="scenarios, workloads, graders, monitors, rules, dialects.")
    ] = None,
) -> None:
    """List what there is: scenarios and plug-ins, with one line on each."""
    kinds = ["scenarios", *plugins.KINDS]
    if kind is not None and kind not in kinds:
        raise UserError(f'list: there is no kind "{kind}"{strict.nearest(kind, kinds)}')
    for each in [kind] if kind else kinds:
        plain.print(Text(each, "bold"))
        names = scenario.names() if each == "scenarios" else plugins.names(each)
        for name in names:
            about = scenario.load(name).about if each == "scenarios" else plugins.about(each, name)
            plain.print(f"  {name:<14} {about.strip().partition(chr(10))[0]}", markup=False)


@app.command()
def validate(
    name: ScenarioName,
    duration: Annotated[str | None, typer.Option(help="As in `run`.")] = None,
    sets: Sets = None,
    prefill: Annotated[float, typer.Option(help="Assumed prefill speed, tokens/s.")] = 2000.0,
    decode: Annotated[float, typer.Option(help="Assumed decode speed of one stream, tokens/s.")] = 40.0,
) -> None:
    """Check a scenario without a server: resolved values, expected samples per class, rules out of reach."""
    from loadgen import expect

    scene = scenario.load(name, sets or [], _duration("--duration", duration))
    plain.print(scenario.dump(scene), markup=False)
    plain.print(expect.text(scene, prefill_per_s=prefill, decode_per_s=decode), markup=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of a scenario file, for editors."""
    plain.print(orjson.dumps(scenario.schema(), option=orjson.OPT_INDENT_2).decode(), markup=False)


# ---------------------------------------------------------------------------------------------------------------------
# probe and sim

_LIMITS = Limits()


@app.command()
def probe(
    url: Annotated[str, typer.Argument(help="The server, for example http://127.0.0.1:8000.")],
    model: Model = None,
    dialect: Dialect = None,
    api_key_env: KeyEnv = None,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    insecure: Insecure = False,
    proxy_from_env: ProxyFromEnv = False,
    header: Headers = None,
    extra_body: ExtraBody = None,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Say hello in one short sentence.",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Make the answer exactly --max-tokens long.")] = False,
    requests: Annotated[int, typer.Option(help="How many requests.", min=1)] = 1,
    concurrency: Annotated[int, typer.Option(help="How many at once.", min=1)] = 1,
    endpoint: Annotated[str | None, typer.Option(help="Path of the endpoint; default: the dialect's own.")] = None,
    connect_timeout: Annotated[str, typer.Option(help="Limit: until connected.")] = f"{_LIMITS.connect_timeout:g}s",
    header_timeout: Annotated[str, typer.Option(help="Limit: no byte of a response.")] = f"{_LIMITS.header_timeout:g}s",
    idle_timeout: Annotated[str, typer.Option(help="Limit: no byte.")] = f"{_LIMITS.idle_timeout:g}s",
    progress_timeout: Annotated[str, typer.Option(help="Limit: no token.")] = f"{_LIMITS.progress_timeout:g}s",
    timeout: Annotated[str, typer.Option(help="Limit: the whole request.")] = f"{_LIMITS.timeout:g}s",
    cancel_after: Annotated[
        str | None,
        typer.Option(
            help="Cut one request after so long and see when the server's running gauge falls. Exit 1: never."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per request on standard output.")] = False,
) -> None:
    """Is it alive, and what does one request look like? Exit 0 when every request succeeded, else 1."""
    from loadgen import probe as probing
    from loadgen import secrets

    limits = Limits(
        connect_timeout=_duration("--connect-timeout", connect_timeout) or Seconds(0),
        header_timeout=_duration("--header-timeout", header_timeout) or Seconds(0),
        idle_timeout=_duration("--idle-timeout", idle_timeout) or Seconds(0),
        progress_timeout=_duration("--progress-timeout", progress_timeout) or Seconds(0),
        timeout=_duration("--timeout", timeout) or Seconds(0),
    )
    target = _asking(_target(Target(), [url], model, api_key_env), dialect, header, extra_body)
    target = _reached(target, ca_file, client_cert, client_key, insecure, proxy_from_env)
    target = replace(target, endpoint=endpoint)
    headers = secrets.headers(target)

    async def cut(after_s: float) -> bool:
        seen = await probing.cancel(
            target, limits, headers=headers, model=model, prompt=prompt, max_tokens=max_tokens, after_s=after_s
        )
        if as_json:
            sys.stdout.write(orjson.dumps(seen).decode() + "\n")
        elif seen["cancel_seen_ms"] is None:
            plain.print(f"the server still counts it as running after {probing.CANCEL_SEEN_S:g} s")
        else:
            plain.print(f"the server stopped counting it as running after {seen['cancel_seen_ms']:.0f} ms")
        return seen["cancel_seen_ms"] is not None

    async def ask() -> bool:
        all_ok = True
        answers = probing.probe(
            target,
            limits,
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            requests=requests,
            concurrency=concurrency,
            headers=headers,
        )
        async for answer in answers:
            all_ok = all_ok and answer["outcome"] == "ok"
            if as_json:
                sys.stdout.write(orjson.dumps(answer).decode() + "\n")
                sys.stdout.flush()
            else:
                plain.print(probing.sentence(answer), markup=False)
        return all_ok

    import uvloop

    after_s = _duration("--cancel-after", cancel_after)
    raise typer.Exit(0 if uvloop.run(ask() if after_s is None else cut(after_s)) else 1)


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="The server; without it only the machine is looked at.")] = None,
    model: Model = None,
    dialect: Dialect = None,
    api_key_env: KeyEnv = None,
    ca_file: CaFile = None,
    insecure: Insecure = False,
    root: Annotated[
        Path, typer.Option(help="A file tree that stands in for this machine's /proc and /sys.", metavar="DIR")
    ] = Path("/"),
    out: Annotated[Path, typer.Option(help="Where run folders would go.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """What can be seen here, what serves, what would spoil a run. Exit 1 when a problem would; notes do not."""
    from loadgen import doctor as diagnosing
    from loadgen import secrets

    target = None
    if url is not None:
        target = _asking(_target(Target(), [url], model, api_key_env), dialect, None, None)
        target = _reached(target, ca_file, None, None, insecure, False)
    elif model is not None or dialect is not None or api_key_env is not None:
        raise UserError("--model, --dialect and --api-key-env are about a server: give its URL")
    headers = secrets.headers(target) if target is not None else {}
    with errors.status("looking …") if errors.is_terminal and not as_json else nullcontext():
        found = diagnosing.examine(target, headers, root=str(root), out=out)
    if as_json:
        sys.stdout.write(orjson.dumps(diagnosing.document(found), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        layout = Console(highlight=False, width=None if plain.is_terminal else DOCTOR_COLUMNS)
        with layout.capture() as captured:
            layout.print(diagnosing.screen(found, layout.width))
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    raise typer.Exit(found.exit_code)


@app.command()
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="A third of a minute: fewer streams.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table as one JSON object.")] = False,
) -> None:
    """Is loadgen right on this machine? A minute against a scripted server; PASS (exit 0) or FAIL (1)."""
    from loadgen.selftest import suite

    if errors.is_terminal:
        with errors.status("") as status:
            report = suite.run(quick, lambda text: status.update(Text(text)))
    else:
        report = suite.run(quick, lambda text: errors.print(text, markup=False, soft_wrap=True))
    if as_json:
        sys.stdout.write(suite.as_json(report).decode() + "\n")
    else:
        plain.print(suite.table(report), markup=False)
    raise typer.Exit(0 if report.overall == "PASS" else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def sim(context: typer.Context) -> None:
    """Start the simulated inference server (`loadgen sim --help` lists its options)."""
    from loadgen.sim import __main__ as simulator

    raise typer.Exit(simulator.main(context.args))
