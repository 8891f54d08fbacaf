"""A summary as people read it: `report.md`, and the block of at most 15 lines that also ends a run on the terminal.

Finished numbers come in and text goes out; nothing is computed here but layout. A report stays below the 65,000
characters that an issue on GitHub takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from loadgen.summary import Bar, ClassRow, Event, Extreme, Figure, Summary, Times
from loadgen.types import Finding, UserError

BLOCK_LINES = 15
BLOCK_REASONS = 3
BLOCK_CLASSES = 5
MAX_CHARS = 65_000
# A rule may find something in each of hundreds of groups; more than this per table are counted instead.
MAX_ROWS = 60
MAX_CELL = 300
# Memory that no kernel counter explains is a driver's where there is this much of it; below, it is rounding and slack.
DRIVER_BYTES = 1 << 30
RAMP = "▁▂▃▄▅▆▇█"
# Percentiles in the latency tables.
SHOWN = ("p50", "p90", "p95", "p99", "p99.9")
NAMES = {
    "ttft": "sent → first token", "ttfo": "sent → first token that is not reasoning",
    "gap": "between chunks with tokens",
    "tpot": "per output token, by usage", "tpot_estimated": "per output token, tokens estimated",
    "e2e": "sent → last token", "connect": "making a connection", "queue": "waiting in the client",
    "send_lag": "due → sent", "ttft_due": "due → first token", "e2e_due": "due → last token",
}  # fmt: skip


def block_of(folder: Path) -> str:
    """The summary block of a judged run folder. Raises UserError where it was not judged yet."""
    try:
        data = (folder / "summary.json").read_bytes()
        return block(msgspec.json.decode(data, type=Summary))
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{folder}: no summary to read ({error}); make one with `loadgen judge {folder}`") from None


def block(s: Summary) -> str:
    """At most 15 lines: the verdict and why, the axes, the load, each class, the host, the generator."""
    lines = [f"{s.verdict.line}"]
    more = len(s.verdict.reasons) - BLOCK_REASONS
    for i, reason in enumerate(s.verdict.reasons[:BLOCK_REASONS]):
        lines.append(
            f"  why: {_short(reason, 160)}" + (f" (+{more} more)" if more > 0 and i == BLOCK_REASONS - 1 else "")
        )
    lines.append(" · ".join(f"{axis.upper()} {word}" for axis, word in s.verdict.axes.items()))
    r = s.requests
    lines.append(
        f"load: {_length(s)}, {s.concurrency} seats, {r.ok + r.failed + r.incomplete} requests: "
        f"{r.ok} ok, {r.failed} failed, {r.incomplete} cut"
    )
    rows = sorted(s.classes, key=lambda c: -(c.ok + c.failed + c.incomplete))
    lines += [f"  {_class_line(row)}" for row in rows[:BLOCK_CLASSES]]
    if len(rows) > BLOCK_CLASSES:
        lines[-1] += f" (+{len(rows) - BLOCK_CLASSES} rows in the report)"
    lines.append(f"host: {_host_line(s)}")
    lines.append(f"events: {_events_line(s.events)}")
    lines.append(f"generator: {_generator_line(s)}")
    lines.append("report.md has tables, findings, thresholds and what was not seen")
    assert len(lines) <= BLOCK_LINES, lines
    return "\n".join(lines)


def markdown(s: Summary, findings: Sequence[Finding]) -> str:
    """The whole report."""
    parts = [
        f"# {s.scenario}: {s.verdict.line}",
        f"```\n{block(s)}\n```",
        *_section("Why", _bullets(s.verdict.reasons)),
        *_section("Latencies", _latencies(s)),
        *_section("Histograms", _histograms(s)),
        *_section("Outcomes", _outcomes(s)),
        *_section("What the model could do", _functional(s)),
        *_section("Findings", _findings(findings)),
        *_section("What the monitors saw under load", _extremes(s.extremes)),
        *_section("What happened", _events(s.events)),
        *_section("What was seen and what was not", _seen(s, findings)),
        *_section("Thresholds used", _thresholds(s)),
        *_section("Fingerprint", _fingerprint(s)),
        *_section("What this verdict does not mean", _bullets(_limits(s, findings))),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    if len(text) <= MAX_CHARS:
        return text
    note = "\n\n… cut here: summary.json and findings.json have the rest.\n"
    return text[: MAX_CHARS - len(note)].rpartition("\n")[0] + note


# ---------------------------------------------------------------------------------------------------------------------
# Lines of the block


def _length(s: Summary) -> str:
    if s.measured_s is None:
        return "nothing measured"
    return f"measured {s.measured_s:.0f} s" + (f" of {s.planned_s:.0f} s" if s.planned_s is not None else "")


def _class_line(row: ClassRow) -> str:
    ttft = row.latencies.get("ttft")
    rate = "rate unknown" if row.output_tokens_per_s is None else f"{row.output_tokens_per_s:.1f} tok/s"
    if row.tokens_source == "estimated":
        rate += " (estimated)"
    if ttft is None:
        return f"{row.cls} {row.cache}: no good answer of {row.ok + row.failed + row.incomplete}"
    said = ", ".join(f"{p} {_percentile(ttft, p)}" for p in ("p50", "p95") if p in ttft.percentiles)
    return f"{row.cls} {row.cache}: TTFT {said or f'max {_ms(ttft.max_ms)}'} (n {ttft.n}), {rate}"


def _host_line(s: Summary) -> str:
    words = {
        ("host", "mem_available_bytes"): "MemAvailable low-water",
        ("host", "swap_free_bytes"): "swap free low-water",
        ("host", "driver_residual_bytes"): "driver memory at most",
        ("nvidia", "memory_used_bytes"): "GPU memory at most",
        ("nvidia", "temperature_c"): "GPU at most",
    }
    said = [
        f"{words[e.monitor, e.metric]}{_labels(e)} {_value(e.metric, e.value)}"
        for e in s.extremes
        if (e.monitor, e.metric) in words
        and e.mean > 0
        and (e.metric != "driver_residual_bytes" or e.value >= DRIVER_BYTES)
    ]
    return _short(", ".join(said) or "not observed", 200)


def _events_line(events: Sequence[Event]) -> str:
    said = {
        "OOM kills": ("oom_kill_memcg", "oom_kill_global", "userspace_oom_kill"),
        "restarts": ("restart",),
        "processes gone": ("process_gone",),
        "driver memory refusals": ("nv_no_memory",),
        "Xids": ("xid",),
    }
    return ", ".join(f"{sum(e.n for e in events if e.name in of)} {what}" for what, of in said.items())


def _generator_line(s: Summary) -> str:
    own = sorted((e for e in s.extremes if e.monitor == "client"), key=lambda e: e.value)
    of = {e.metric: e for e in own}  # of several shards the worst
    said = []
    if s.times.achieved_seats is not None:
        said.append(f"{s.times.achieved_seats:.4g} of {s.concurrency} seats busy")
    if s.times.source is not None:
        said.append(_times_line(s.times))
    if "loop_lag_ms" in of:
        said.append(f"loop lag at most {of['loop_lag_ms'].value:.1f} ms")
    if "cpu_percent" in of:
        said.append(f"CPU mean {of['cpu_percent'].mean:.1f} %, at most {of['cpu_percent'].value:.0f} %")
    if "rss_bytes" in of:
        flat = s.rss_spread_last_half_bytes
        said.append(
            f"RSS {_value('_bytes', of['rss_bytes'].value)}"
            + ("" if flat is None else f" (±{flat / (1 << 20):.1f} MiB in the last half)")
        )
    return ", ".join(said) or "not observed"


def _times_line(times: Times) -> str:
    source = {"kernel": "kernel times", "read": "times of our reads"}.get(times.source or "", "times of both kinds")
    share = f", {100 * (times.inexact_share or 0.0):.2g} % inexact"
    if times.lag is None:
        return source + share
    late = [_ms(times.lag.percentiles[p].ms) for p in ("p50", "p99") if p in times.lag.percentiles]
    return f"{source}{share}, read {' / '.join([*late, _ms(times.lag.max_ms)])} late (p50 / p99 / max)"


# ---------------------------------------------------------------------------------------------------------------------
# Sections


def _section(title: str, body: str) -> tuple[str, ...]:
    return (f"## {title}", body) if body else ()


def _latencies(s: Summary) -> str:
    parts = []
    for row in s.classes:
        if not row.latencies:
            continue
        rate = "" if row.output_tokens_per_s is None else f", {row.output_tokens_per_s:.1f} output tokens/s"
        source = f" (tokens: {row.tokens_source})" if row.tokens_source else ""
        cached = ""
        if row.cached_tokens is not None and row.prompt_tokens:
            cached = (
                f", {100 * row.cached_tokens / row.prompt_tokens:.0f} % of the prompt tokens from the server's cache"
            )
        counts = f"{row.ok} ok, {row.failed} failed, {row.incomplete} cut"
        head = f"**{_cell(row.cls)}, {row.cache}**: {counts}{rate}{source}{cached}"
        table = _table(
            ("", "n", "mean", *SHOWN, "max", ""),
            (
                (
                    metric,
                    figure.n,
                    _ms(figure.mean_ms),
                    *(_percentile(figure, p) for p in SHOWN),
                    _ms(figure.max_ms),
                    NAMES[metric],
                )
                for metric, figure in row.latencies.items()
            ),
        )
        parts.append(f"{head}\n\n{table}")
    if parts:
        parts.append(
            "Good answers only. A percentile in (brackets) is not certified: n is too small to state it with 99 % "
            "confidence, and no rule fails on it. `–`: n does not even print it."
        )
    return "\n\n".join(parts)


def _histograms(s: Summary) -> str:
    lines = []
    for row in s.classes:
        for metric, figure in row.latencies.items():
            if figure.histogram:
                first, last = figure.histogram[0], figure.histogram[-1]
                name = f"{row.cls} {row.cache} {metric}"
                lines.append(
                    f"{name:<32} {_ms(first.from_ms):>8} {sketch(figure.histogram)} {_ms(last.to_ms)} (n {figure.n})"
                )
    return (
        "```\n" + "\n".join(lines) + "\n```\n\nEach bar is a step of a logarithmic scale; a dot is an empty one."
        if lines
        else ""
    )


def sketch(bars: Sequence[Bar]) -> str:
    """One character a bar; anything that is not empty shows."""
    most = max((bar.n for bar in bars), default=0)
    return "".join("·" if not bar.n else RAMP[min(len(RAMP) - 1, bar.n * len(RAMP) // (most + 1))] for bar in bars)


def _outcomes(s: Summary) -> str:
    counts = _table(
        ("class", "cache", "ok", "failed", "cut by us"),
        ((row.cls, row.cache, row.ok, row.failed, row.incomplete) for row in s.classes),
    )
    errors = (
        _table(("error class", "requests"), s.errors.items()) if s.errors else "No request failed." if s.classes else ""
    )
    flags = _table(("flag", "requests"), s.flags.items()) if s.flags else ""
    return "\n\n".join(part for part in (counts, errors, flags) if part)


def _functional(s: Summary) -> str:
    rows = [(f.cls, f.asked, f.right, f"left out: {f.left_out}" if f.left_out else "in the mix") for f in s.functional]
    return _table(("class", "asked alone", "right", ""), rows) if rows else ""


def _findings(findings: Sequence[Finding]) -> str:
    order = {"fail": 0, "warn": 1, "not_evaluated": 2, "pass": 3}
    ranked = sorted(findings, key=lambda f: (order[f.status], not f.hard, f.rule, f.scope))
    rows = [
        (
            "**fail, hard**" if f.hard else f.status.replace("_", " "), f.rule, f.axis, f.message,
            "" if f.number is None else f"{f.number:.4g} {f.unit}".strip(), "" if f.bound is None else f"{f.bound:.4g}",
            "" if f.n is None else f.n, f.evidence,
        )
        for f in ranked
    ]  # fmt: skip
    return _table(("", "rule", "axis", "what", "number", "bound", "n", "evidence"), rows)


def _extremes(extremes: Sequence[Extreme]) -> str:
    rows = [
        (
            f"{e.monitor} {e.metric}{_labels(e)}", f"{e.kind} {_value(e.metric, e.value)}", _clock(e.at_s),
            _value(e.metric, e.mean), e.n,
        )
        for e in extremes
    ]  # fmt: skip
    return _table(("metric", "worst", "at", "mean", "n (seconds)"), rows) if rows else ""


def _events(events: Sequence[Event]) -> str:
    rows = [(_clock(e.first_s), e.monitor, e.name, e.n) for e in events]
    return _table(("first at", "monitor", "event", "count"), rows) if rows else ""


def _seen(s: Summary, findings: Sequence[Finding]) -> str:
    rows = [
        (m.monitor, "observed" if m.observed else "**NOT OBSERVED**", _short(m.why, 120 if m.observed else MAX_CELL))
        for m in s.monitors
    ]
    open_ = [f"{f.rule}: {f.message}" for f in findings if f.status == "not_evaluated" and f.rule != "blind"]
    table = _table(("monitor", "", ""), rows) if rows else "No monitor ran."
    return table + ("\n\nNot evaluated:\n\n" + _bullets(open_) if open_ else "")


def _thresholds(s: Summary) -> str:
    lines = []
    for rule, options in sorted(s.thresholds.items()):
        if options:
            lines.append(f"{rule}: " + ", ".join(f"{key} {_plain(value)}" for key, value in options.items()))
    return _bullets(lines)


def _fingerprint(s: Summary) -> str:
    facts = [
        ("loadgen", s.loadgen),
        ("started", s.started_utc or "unknown"),
        ("seed", str(s.seed)),
        *_flat("", s.fingerprint),
    ]
    return _table(("what", "is"), facts)


def _limits(s: Summary, findings: Sequence[Finding]) -> Iterator[str]:
    """What must not be quoted from this run."""
    if s.measured_s is not None:
        yield f"It speaks of {s.measured_s:.0f} s of this mix at {s.concurrency} seats, not of longer or other loads."
    yield "One boot of the server: restarts of one configuration differ by up to 10 % in cache size and throughput."
    if any(not m.observed for m in s.monitors):
        unseen = ", ".join(m.monitor for m in s.monitors if not m.observed)
        yield f"Nothing is known of what {unseen} would have seen."
    if any(f.left_out for f in s.functional):
        out = ", ".join(f.cls for f in s.functional if f.left_out)
        yield f"Nothing is known of {out} under load."
    if any(
        not p.certified for row in s.classes for figure in row.latencies.values() for p in figure.percentiles.values()
    ):
        yield "Percentiles in brackets may not be compared with those of another run."
    if s.requests.incomplete:
        yield f"{s.requests.incomplete} requests were cut at the end; the latencies lack them, mostly long ones."
    if any(f.rule == "blind" and f.status == "not_evaluated" for f in findings):
        yield "A sign that was not observed is no sign of health."


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    body = [[_cell(str(cell)) for cell in row] for row in rows]
    left_over = len(body) - MAX_ROWS
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in body[:MAX_ROWS]]
    return "\n".join(lines) + (f"\n\n… and {left_over} more." if left_over > 0 else "")


def _cell(text: str) -> str:
    """Safe inside a table: a server's words may hold anything."""
    return _short(" ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'"), MAX_CELL)


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _bullets(lines: Iterable[str]) -> str:
    every = [f"- {_cell(line)}" for line in lines]
    more = len(every) - MAX_ROWS
    return "\n".join(every[:MAX_ROWS] + ([f"- … and {more} more"] if more > 0 else []))


def _percentile(figure: Figure, p: str) -> str:
    found = figure.percentiles.get(p)
    return "–" if found is None else _ms(found.ms) if found.certified else f"({_ms(found.ms)})"


def _ms(ms: float) -> str:
    if ms < 1:
        return f"{1000 * ms:.0f} µs"
    if ms < 100:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def _value(metric: str, value: float) -> str:
    """A reading with the unit that its name ends in."""
    if metric.endswith("_bytes"):
        return f"{value / (1 << 30):.1f} GiB" if abs(value) >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"
    for end, unit in (("_percent", " %"), ("_c", " °C"), ("_w", " W"), ("_mhz", " MHz"), ("_ms", " ms")):
        if metric.endswith(end):
            return f"{value:.1f}{unit}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _labels(e: Extreme) -> str:
    return f" ({', '.join(f'{k} {v}' for k, v in e.labels.items())})" if e.labels else ""


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(str, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Nested facts as dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif value is not None:
        yield prefix, _plain(value)
