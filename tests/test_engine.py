from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from loadgen import scenario, strict
from loadgen.engine import Engine, inline, watch_health
from loadgen.sim.model import EngineConfig
from loadgen.types import Json, Outcome, Request, Scenario
from tests import virtual
from tests.virtual import S, Tape, VirtualServer

CHAT = {"chat_short": {"weight": 3}, "arithmetic": {"weight": 1}}


def scene(**fields: Any) -> Scenario:
    data: Json = {"name": "test", "classes": CHAT, "phases": [{"kind": "measure", "duration": 60}], **fields}
    built = strict.build(Scenario, data)
    scenario.check(built)
    return built


def engine_for(scene: Scenario, server: VirtualServer, tape: Tape, shard: int = 0, shards: int = 1) -> Engine:
    return Engine(
        scene,
        sender=server,
        encode=lambda request: b"",
        recorder=tape,
        shard=shard,
        shards=shards,
        now_ns=virtual.now_ns,
        off_loop=inline,
    )


def play(scene: Scenario, config: EngineConfig | None = None, **fields: Any) -> tuple[Tape, VirtualServer]:
    tape = Tape()

    async def main() -> VirtualServer:
        server = VirtualServer(config)
        for name, value in fields.items():
            setattr(server, name, value)
        await engine_for(scene, server, tape).run()
        await server.close()
        return server

    return tape, virtual.run(main())


def test_all_seats_are_always_busy_and_never_more() -> None:
    tape, server = play(scene(concurrency=6))
    assert server.most_at_once == 6
    busy_ns = sum((o.done_ns or 0) - o.due_ns for o in tape.outcomes)
    assert busy_ns / S == pytest.approx(6 * 60, rel=0.05)  # Little's law: mean in flight = seats


def test_a_request_is_due_the_moment_its_seat_is_free() -> None:
    tape, _ = play(scene(concurrency=1))
    for before, after in zip(tape.outcomes, tape.outcomes[1:], strict=False):
        assert abs(after.due_ns - (before.done_ns or 0)) <= 1  # a rounding of the virtual clock


def test_seats_begin_one_after_the_other_and_a_waiting_seat_owes_nothing() -> None:
    tape, server = play(scene(concurrency=200, phases=[{"kind": "measure", "count": 200}]))
    due = sorted(o.due_ns for o in tape.outcomes)
    assert server.most_at_once <= 200
    assert due[-1] - due[0] == pytest.approx(199 * 0.002 * S, rel=0.05)
    assert all((o.sent_ns or 0) - o.due_ns < 0.01 * S for o in tape.outcomes)
    tape, _ = play(scene(concurrency=2000, phases=[{"kind": "measure", "count": 2000}]))
    due = sorted(o.due_ns for o in tape.outcomes)
    assert due[-1] - due[0] < 2.01 * S  # thousands do not take longer than that


def test_the_mix_has_the_promised_shares() -> None:
    tape, _ = play(scene(phases=[{"kind": "measure", "count": 400}]))
    assert Counter(o.cls for o in tape.outcomes) == {"chat_short": 300, "arithmetic": 100}


def test_warm_up_flows_into_measuring_without_a_drain() -> None:
    phases = [{"kind": "warmup", "duration": 20}, {"kind": "measure", "duration": 20}]
    tape, _ = play(scene(phases=phases))
    start = tape.named("phase_start")[1]["at"]
    across = [o for o in tape.outcomes if o.phase == "warmup" and (o.done_ns or 0) > start]
    assert len(across) == 4  # every seat was in the middle of a request, which stays the warm-up's
    assert tape.named("phase_drained")[0]["issued"] == sum(o.phase == "warmup" for o in tape.outcomes)


def test_issued_is_ok_plus_failed_plus_incomplete_in_every_phase() -> None:
    phases = [{"kind": "functional"}, {"kind": "warmup", "count": 13}, {"kind": "measure", "duration": 30, "drain": 0}]
    tape, _ = play(scene(phases=phases))
    drained = tape.named("phase_drained")
    assert [d["phase"] for d in drained] == ["functional", "warmup", "measure"]
    for phase in drained:
        outcomes = [o for o in tape.outcomes if o.phase == phase["phase"]]
        assert phase["issued"] == len(outcomes) == phase["ok"] + phase["failed"] + phase["incomplete"]


def test_what_the_drain_limit_cuts_is_incomplete() -> None:
    slow = EngineConfig(step_ms=20_000)
    tape, _ = play(scene(phases=[{"kind": "measure", "duration": 5, "drain": 3}]), slow)
    assert {o.outcome for o in tape.outcomes} == {"incomplete"}
    drained = tape.named("phase_drained")[0]
    assert drained["cut"] == drained["incomplete"] == 4
    assert drained["at"] == 8 * S


def test_a_reserved_seat_asks_its_class_alone_and_starves_nobody() -> None:
    classes = {"chat_short": {"weight": 1}, "generate": {"seats": 1, "options": {"max_tokens": 2048}}}
    tape, server = play(scene(classes=classes))
    seats = {o.cls: set() for o in tape.outcomes}
    for o in tape.outcomes:
        seats[o.cls].add(o.seat)
    assert seats == {"generate": {0}, "chat_short": {1, 2, 3}}
    assert server.most_at_once == 4


def test_the_functional_phase_asks_each_class_alone() -> None:
    tape, server = play(scene(phases=[{"kind": "functional"}]))
    assert Counter(o.cls for o in tape.outcomes) == {"chat_short": 3, "arithmetic": 3}
    assert server.most_at_once == 1


def test_the_functional_phase_asks_what_the_load_asks_first_under_another_salt() -> None:
    phases = [{"kind": "functional"}, {"kind": "measure", "count": 40}]
    _, server = play(scene(phases=phases, salt="s"))
    asked = {p: [r for r in server.sent if r.phase == p and r.cls == "arithmetic"] for p in ("functional", "measure")}
    for alone, loaded in zip(asked["functional"], asked["measure"], strict=False):
        assert alone.expect == loaded.expect
        assert alone.messages != loaded.messages


class WrongServer(VirtualServer):
    """Cannot count."""

    async def send(self, request: Request, body: bytes) -> Outcome:
        outcome = await super().send(request, body)
        if request.cls == "arithmetic":
            outcome.text = "7"
        return outcome


def test_a_class_that_the_model_cannot_answer_is_left_out_aloud() -> None:
    tape = Tape()
    phases = [{"kind": "functional"}, {"kind": "measure", "duration": 10}]

    async def main() -> None:
        server = WrongServer()
        await engine_for(scene(phases=phases), server, tape).run()
        await server.close()

    virtual.run(main())
    [left_out] = tape.named("class_left_out")
    assert left_out["cls"] == "arithmetic"
    assert "3 of 3" in left_out["why"]
    assert {o.cls for o in tape.outcomes if o.phase == "measure"} == {"chat_short"}


def test_the_first_press_drains_and_the_second_cuts() -> None:
    slow = EngineConfig(step_ms=500)
    tape = Tape()

    async def main() -> tuple[str, float]:
        server = VirtualServer(slow)
        engine = engine_for(scene(phases=[{"kind": "measure", "duration": 600, "drain": 300}]), server, tape)
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(20)
        engine.stop.press()
        await asyncio.sleep(2)
        assert not running.done()
        engine.stop.press()
        reason = await running
        await server.close()
        return reason, asyncio.get_running_loop().time()

    reason, ended_s = virtual.run(main())
    assert reason == "signal"
    assert ended_s < 25
    assert tape.named("phase_end")[0]["at"] == 20 * S
    assert sum(o.outcome == "incomplete" for o in tape.outcomes) == 4


def test_a_stop_in_the_functional_phase_ends_the_run() -> None:
    tape = Tape()

    async def main() -> str:
        server = VirtualServer(EngineConfig(step_ms=500))
        phases = [{"kind": "functional"}, {"kind": "measure", "duration": 600}]
        engine = engine_for(scene(phases=phases), server, tape)
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(5)
        engine.stop.press()
        reason = await running
        await server.close()
        return reason

    assert virtual.run(main()) == "signal"
    assert {o.phase for o in tape.outcomes} == {"functional"}
    assert len(tape.outcomes) == 1


def test_a_dead_server_is_asked_ever_more_slowly_and_noticed_again() -> None:
    tape, _ = play(scene(phases=[{"kind": "measure", "duration": 120}]), refuse_from_s=20.0, refuse_to_s=80.0)
    refused = [o for o in tape.outcomes if o.error_class == "connect_refused"]
    assert 4 * 12 <= len(refused) <= 4 * 20  # 60 s at one try per 5 s and seat, a few quick ones first
    back = [o for o in tape.outcomes if o.outcome == "ok" and o.due_ns > 80 * S]
    assert min(o.due_ns for o in back) < 86 * S


def test_eight_hours_pass_in_seconds_and_the_same_seed_gives_the_same_outcomes() -> None:
    long = scene(
        phases=[{"kind": "measure", "duration": "8h"}],
        classes={"generate": {"weight": 1, "options": {"max_tokens": 512}}, "arithmetic": {"weight": 1}},
    )
    slow = EngineConfig(step_ms=900)

    def digest() -> list[tuple[str, int, int | None, str]]:
        tape, _ = play(long, slow)
        return [(o.id, o.due_ns, o.done_ns, o.outcome) for o in tape.outcomes]

    first = digest()
    assert (first[-1][2] or 0) >= 8 * 3600 * S
    assert first == digest()


@pytest.mark.parametrize("shards", [2, 3])
def test_a_count_limited_phase_sends_the_same_requests_for_any_number_of_shards(shards: int) -> None:
    counted = scene(phases=[{"kind": "measure", "count": 50}], concurrency=6, salt="x")

    def requests(shards: int) -> list[tuple[str, str]]:
        sent: list[tuple[str, str]] = []
        for shard in range(shards):

            async def main(shard: int = shard) -> None:
                server = VirtualServer()
                await engine_for(counted, server, Tape(), shard, shards).run()
                await server.close()
                sent.extend((r.id, r.messages[0]["content"]) for r in server.sent)

            virtual.run(main())
        return sorted(sent)

    assert requests(shards) == requests(1)


def test_an_error_of_ours_in_a_seat_is_raised_at_once_not_swallowed() -> None:
    class Broken(VirtualServer):
        async def send(self, request: Request, body: bytes) -> Outcome:
            raise RuntimeError("our fault")

    async def main() -> None:
        await engine_for(scene(), Broken(), Tape()).run()

    with pytest.raises(RuntimeError, match="our fault"):
        virtual.run(main())


def test_the_generator_samples_its_own_health() -> None:
    tape = Tape()

    async def main() -> None:
        server = VirtualServer()
        engine = engine_for(scene(phases=[{"kind": "measure", "duration": 10}]), server, tape)
        health = asyncio.create_task(watch_health(engine, lambda: 0, lambda: 1 << 20))
        await engine.run()
        health.cancel()
        await server.close()

    virtual.run(main())
    metrics = {s.metric: s.value for s in tape.samples_ if not s.labels}
    assert metrics["requested_seats"] == 4
    assert metrics["rss_bytes"] == 1 << 20
    assert {"in_flight", "loop_lag_ms", "cpu_percent", "issued_total", "ok_total"} <= metrics.keys()
