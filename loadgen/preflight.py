"""Before the first measured request: does the server answer, what is it, and does every class fit it?

Ready means that a tiny generation succeeded, not that `/health` says 200. Context and slots are read where the server
tells them; a class that is too long is shrunk or left out, aloud. Nothing here is measured load.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from loadgen import plugins, strict
from loadgen.client import Client, NoEndpointError
from loadgen.types import (
    Calibration,
    ClassSpec,
    Draw,
    Json,
    NotReadyError,
    Outcome,
    Request,
    Scenario,
    Target,
    UserError,
)
from monitors import prometheus
from workloads import calibrate

Connect: TypeAlias = Callable[[Target, str], Client]

# A control call that takes longer than this is no answer; a first generation may compile kernels.
CONTROL_S = 10.0
RETRY_S = 1.0
# Tokens kept free at the edge of a context: servers differ by one or two in what they count there.
EDGE_TOKENS = 8
# Frames are measured by two probes that hold other words and digits: they must agree.
FRAME_PROBES = 2
# A class whose workload names no minimum is left out rather than shrunk below this.
MIN_PROMPT_TOKENS = 64
# Of the engine monitor's figures those that a server settles when it starts.
STANDING = frozenset({
    "kv_capacity_tokens", "kv_concurrency", "kv_blocks", "kv_block_tokens", "context_tokens", "batch_max_tokens",
    "model_bytes", "kv_cache_bytes", "graph_bytes",
})  # fmt: skip
# Requests that run on the server before ours; names of vLLM, SGLang and llama.cpp.
RUNNING = re.compile(
    r"^(?:vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing)(?:\{[^}]*\})? ([0-9.eE+]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server says of itself; None where it does not say. `figures`: of its metrics page those that stay the
    same (KV capacity, block size), by the engine monitor's names; `simulated`: the scales of `loadgen sim`."""

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    context_tokens: int | None = None
    slots: int | None = None
    template_tokens: int | None = None
    tokens_per_word: float | None = None
    lengths: str | None = None
    solo_ttft_ms: float | None = None
    modalities: tuple[str, ...] = ()
    foreign_requests: int | None = None
    revision: str | None = None
    quantization: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    chat_template_sha256: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    simulated: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A class that does not go as asked: shrunk (asked → got), or left out (got None)."""

    cls: str
    why: str
    asked: int | None = None
    got: int | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """The scenario as it will run, what is known of the server, and what had to change."""

    scenario: Scenario
    facts: Facts
    changes: tuple[Change, ...]


async def examine(
    scene: Scenario, connect: Connect, *, wait_s: float, busy_ok: bool, say: Callable[[str], None]
) -> Preflight:
    """Raises NotReadyError where nothing serves (after `wait_s`) or others use the server, UserError for the rest.

    `connect(target, model)` makes a client; the caller owns its secrets. Of several servers each must answer and serve
    the same model; classes fit the smallest context, and lengths are calibrated against the first.
    """
    first, *others = [replace(scene, target=target) for target in _each(scene.target)]
    facts = await ready(first, connect, wait_s, say)
    for other in others:
        more = await ready(replace(other, target=replace(other.target, model=facts.model)), connect, wait_s, say)
        facts = _together(facts, more)
    first = replace(first, target=replace(first.target, model=facts.model))
    client = connect(first.target, facts.model or "")
    try:
        calibrated, facts = await _calibrate(first, client, facts)
        fitted, changes = fit(calibrated)
        fitted = await _calibrate_frames(fitted, client)
    finally:
        await client.close()
    fitted = replace(fitted, target=replace(scene.target, model=facts.model))
    if facts.foreign_requests and not busy_ok:
        raise NotReadyError(
            f"{scene.target.url}: the server is busy with {facts.foreign_requests} requests that are not ours; "
            "wait until it is quiet, or say --allow-busy"
        )
    if not fitted.classes:
        raise UserError(f"no class of the scenario fits this server: {'; '.join(c.why for c in changes)}")
    return Preflight(fitted, facts, tuple(changes))


def _each(target: Target) -> list[Target]:
    """Each server of the target alone."""
    return [replace(target, url=url, urls=()) for url in target.urls] or [target]


def _together(first: Facts, other: Facts) -> Facts:
    """What may be asked of any of them: the smallest context; slots and foreign requests add up where both tell."""

    def total(a: int | None, b: int | None) -> int | None:
        return None if a is None or b is None else a + b

    contexts = [each.context_tokens for each in (first, other) if each.context_tokens is not None]
    return replace(
        first,
        context_tokens=min(contexts, default=None),
        slots=total(first.slots, other.slots),
        foreign_requests=total(first.foreign_requests, other.foreign_requests),
    )


async def ready(scene: Scenario, connect: Connect, wait_s: float, say: Callable[[str], None]) -> Facts:
    """One server: what it is, and that it generates. Raises as `examine` does."""
    client = connect(scene.target, scene.target.model or "")
    try:
        facts: Facts = await _until_ready(lambda: _identify(scene, client), wait_s, say)
    finally:
        await client.close()
    client = connect(scene.target, facts.model or "")
    try:
        found: Facts = await _until_ready(lambda: _generate(scene, client, facts), wait_s, say)
    finally:
        await client.close()
    return found


async def _until_ready(attempt: Callable[[], Any], wait_s: float, say: Callable[[str], None]) -> Any:
    """The result of the first attempt that does not say NotReadyError; that error when `wait_s` is over."""
    waited = 0.0
    while True:
        try:
            return await attempt()
        except NotReadyError as error:
            if waited >= wait_s:
                raise
            if waited % 10 < RETRY_S:
                say(f"not ready yet ({error}); waiting up to {wait_s - waited:.0f} s more")
        await asyncio.sleep(RETRY_S)
        waited += RETRY_S


# ---------------------------------------------------------------------------------------------------------------------
# What is it?


async def _identify(scene: Scenario, client: Client) -> Facts:
    models = await _models(scene, client)
    model, entry = _choose(scene, models)
    props = await _optional(client, "/props")
    version = await _optional(client, "/version")
    page = await _optional_text(client, "/metrics")
    running = RUNNING.findall(page)
    engine = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang"}.get(str(entry.get("owned_by")))
    context = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
    slots = None
    if settings := props.get("default_generation_settings"):
        engine = "llama.cpp"
        context = settings.get("n_ctx") or context  # of one slot: what one request may fill
        slots = props.get("total_slots")
    modalities = tuple(name for name, on in (props.get("modalities") or {}).items() if on)
    info = await _optional(client, "/server_info") if engine == "SGLang" else {}
    template = props.get("chat_template")
    return Facts(
        engine=engine,
        version=_text(version.get("version")) or _text(props.get("build_info")) or _text(info.get("version")),
        model=model,
        context_tokens=_whole(context),
        slots=_whole(slots),
        modalities=modalities,
        foreign_requests=round(sum(map(float, running))) if running else None,
        revision=_text(info.get("revision")),
        quantization=_text(info.get("quantization")) or _text(props.get("model_ftype")),
        dtype=_text(info.get("dtype")),
        parameters=_whole((entry.get("meta") or {}).get("n_params")),
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None,
        figures=_figures(page),
        simulated={key: str(value) for key, value in (version.get("simulated") or {}).items()},
    )


def _figures(page: str) -> dict[str, float]:
    """What the server's metrics say that stays the same through a run."""
    values, _ = plugins.load("monitors", "engine").normalised(prometheus.parse(page)) if page else ({}, {})
    return {name: value for name, value in values.items() if name in STANDING}


async def _models(scene: Scenario, client: Client) -> list[Json]:
    """The server's list; empty where it has none and the scenario names the model. Raises UserError otherwise."""
    try:
        answer = await client.get_json("/v1/models", CONTROL_S)
    except NoEndpointError as error:
        if scene.target.model is not None:
            return []
        raise UserError(f"{error}; is it an OpenAI-compatible server? (--model NAME if it lists none)") from None
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "id" in entry for entry in listed):
        raise UserError(f"{scene.target.url}/v1/models: not an OpenAI-compatible server (no list of models in it)")
    return listed


def _choose(scene: Scenario, models: list[Json]) -> tuple[str, Json]:
    """The model to ask. One that is asked for must be served: what a wrong name gets differs from server to server."""
    wanted = scene.target.model
    ids = [str(entry["id"]) for entry in models]
    if wanted is None:
        if len(ids) != 1:
            known = f"it serves {', '.join(ids)}: say --model NAME" if ids else "it serves no model"
            raise UserError(f"{scene.target.url}: {known}")
        return ids[0], models[0]
    if not models:
        return wanted, {}
    for entry in models:
        if wanted == entry["id"] or wanted in (entry.get("aliases") or []):
            return wanted, entry
    raise UserError(f'{scene.target.url}: the model "{wanted}" is not served{strict.nearest(wanted, ids)}')


async def _optional(client: Client, path: str) -> Json:
    """An endpoint that only some servers have: {} where this one has not."""
    try:
        answer = await client.get_json(path, CONTROL_S)
    except UserError:
        return {}
    return answer if isinstance(answer, dict) else {}


async def _optional_text(client: Client, path: str) -> str:
    try:
        return await client.get_text(path, CONTROL_S)
    except UserError:
        return ""


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# ---------------------------------------------------------------------------------------------------------------------
# Does it answer, and how does it count?


async def _ask(scene: Scenario, client: Client, request: Request) -> Outcome:
    dialect = plugins.load("dialects", scene.target.dialect)
    body = dialect.encode(request, client.model, scene.target.extra_body)
    return await client.send(request, body)


async def _generate(scene: Scenario, client: Client, facts: Facts) -> Facts:
    """A tiny generation. Raises NotReadyError while it fails for a reason that may pass, UserError otherwise."""
    request = Request("preflight", "preflight", [{"role": "user", "content": "Say hello."}], max_tokens=4)
    outcome = await _ask(scene, client, request)
    if outcome.outcome == "ok":
        return replace(facts, solo_ttft_ms=None if outcome.ttft_ns is None else outcome.ttft_ns / 1e6)
    what = f"{scene.target.url}: a first small request failed: {outcome.error_message or outcome.error_class}"
    if outcome.error_class == "unauthorized":
        raise UserError(f"{what}; give the key with --api-key-env NAME")
    if outcome.error_class == "unexpected_content_type":
        raise UserError(f"{what}; does this address serve {scene.target.dialect}?")
    if outcome.error_class == "http_error" and (outcome.http_status or 0) < 500:
        raise UserError(f"{what}; is {scene.target.endpoint or 'the endpoint'} right for this server?")
    raise NotReadyError(what)


async def _calibrate(scene: Scenario, client: Client, facts: Facts) -> tuple[Scenario, Facts]:
    """Template overhead and tokens per word from `usage` of three tiny requests; where a server does not tell, lengths
    stay estimates and the facts say so. An API that generates nothing has no template, and is not asked."""
    if not plugins.load("dialects", scene.target.dialect).STREAMS:
        facts = replace(facts, lengths=f"estimated: {scene.target.dialect} is not calibrated")
        return replace(scene, calibration=Calibration(0, None, facts.context_tokens, facts.slots)), facts
    points = [(int(r.expect["words"]), n) for r, n in await _counted(scene, client, calibrate.probes(scene.seed))]
    line = calibrate.fit(points) if len({words for words, _ in points}) > 1 else None
    if line is None:
        facts = replace(facts, lengths="estimated: the server reports no usage")
        return replace(scene, calibration=Calibration(0, None, facts.context_tokens, facts.slots)), facts
    facts = replace(
        facts,
        template_tokens=line.template_tokens,
        tokens_per_word=line.tokens_per_word,
        lengths="exact" if line.exact else f"approximate: {line.why}",
    )
    calibration = Calibration(line.template_tokens, line.tokens_per_word, facts.context_tokens, facts.slots)
    return replace(scene, calibration=calibration), facts


async def _calibrate_frames(scene: Scenario, client: Client) -> Scenario:
    """Classes that aim at an exact length have a frame (question, needles) whose tokens a few probes measure."""
    if not plugins.load("dialects", scene.target.dialect).STREAMS:
        return scene
    classes = dict(scene.classes)
    for name, spec in scene.classes.items():
        module = plugins.load("workloads", spec.workload or name)
        if not hasattr(module, "frame_probe"):
            continue
        template = scene.calibration.template_tokens if scene.calibration else 0
        draw = Draw(scene.seed, name, f"{scene.salt}frame", template)
        for spaced in (False, True):  # digits in a row are not equally many tokens in every vocabulary; single ones are
            given = {**spec.options, "spaced": True} if spaced else spec.options
            options = plugins.options(module, given)
            probes = [module.frame_probe(options, draw, number) for number in range(FRAME_PROBES)]
            counted = await _counted(scene, client, probes)
            if not counted:
                break
            frame, spread = calibrate.frame_tokens(counted)
            classes[name] = replace(spec, options={**given, "frame_tokens": frame})
            if spread == 0:
                break
    return replace(scene, classes=classes)


async def _counted(scene: Scenario, client: Client, probes: list[Request]) -> list[tuple[Request, int]]:
    """The probes that the server answered with a count of their prompt tokens, and that count."""
    counted = []
    for probe in probes:
        outcome = await _ask(scene, client, probe)
        if outcome.outcome == "ok" and outcome.prompt_tokens is not None:
            counted.append((probe, outcome.prompt_tokens))
    return counted


# ---------------------------------------------------------------------------------------------------------------------
# Does every class fit?


def fit(scene: Scenario) -> tuple[Scenario, list[Change]]:
    """Shrink what is too long for the server's context, leave out what cannot be shrunk. Pure."""
    context = scene.calibration.context_tokens if scene.calibration else None
    if context is None:
        return scene, []
    classes: dict[str, ClassSpec] = {}
    changes: list[Change] = []
    for name, spec in scene.classes.items():
        module = plugins.load("workloads", spec.workload or name)
        options = plugins.options(module, spec.options)
        asked = int(options.prompt_tokens)
        room = context - int(options.max_tokens) - EDGE_TOKENS
        if asked <= room:
            classes[name] = spec
        elif room >= getattr(module, "MIN_PROMPT_TOKENS", MIN_PROMPT_TOKENS):
            classes[name] = replace(spec, options={**spec.options, "prompt_tokens": room})
            changes.append(Change(name, f"the context is {context} tokens", asked, room))
        else:
            need = asked + int(options.max_tokens)
            changes.append(Change(name, f"{name} needs {need} tokens, the context is {context}", asked))
    return replace(scene, classes=classes), changes
