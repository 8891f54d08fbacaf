"""The engine model on virtual time, how it counts tokens, what it answers, and the scripts of faults."""

from __future__ import annotations

import importlib
import json
import re
import zlib
from dataclasses import fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.sim import answers, config, faults
from loadgen.sim.answers import Prompt, reply
from loadgen.sim.model import Emission, Engine, EngineConfig, MemoryConfig, Sequence, SimRequest
from loadgen.sim.tokens import CHARACTERS, MESSAGE_TOKENS, TEMPLATE_TOKENS, block_hashes, conversation, pieces, tokens
from loadgen.types import Draw, Outcome, Seconds, UserError

STEADY = EngineConfig(
    context_tokens=8192,
    max_num_seqs=4,
    kv_tokens=16_384,
    chunk_tokens=1024,
    prefill_tokens_per_s=10_000,
    prefill_half_depth_tokens=10_000,
    step_ms=10,
    step_ms_per_seq=1,
    step_ms_per_1k_kv_tokens=0,
    jitter=0,
)


def run(engine: Engine, now_s: float = 0.0) -> list[Emission]:
    """All that leaves the engine from now on until it has nothing to do."""
    emitted = engine.advance(now_s)
    while (next_s := engine.next_event_s()) is not None:
        emitted += engine.advance(next_s)
        engine.check()
    return emitted


def unique(prompt: int, output: int, name: int = 0) -> SimRequest:
    """A request whose blocks are those of no other name."""
    return SimRequest(prompt, output, tuple(hash((name, block)) for block in range(prompt // 16)))


def gaps(emitted: list[Emission], sequence: Sequence) -> list[float]:
    at = [emission.at_s for emission in emitted if emission.sequence is sequence]
    return [after - before for before, after in pairwise(at)]


# -- time


def test_step_time_is_the_formula() -> None:
    engine = Engine(STEADY)
    sequence = engine.submit(unique(500, 3), 0.0)
    emitted = run(engine)
    prefill_s = 500 * (1 + 250 / 10_000) / 10_000
    assert [e.at_s for e in emitted] == pytest.approx([0.011 + prefill_s, 0.022 + prefill_s, 0.033 + prefill_s])
    assert sequence.state == "finished"
    assert emitted[-1].finished


def test_prefill_slows_with_depth() -> None:
    def first_s(prompt: int) -> float:
        engine = Engine(STEADY)
        sequence = engine.submit(unique(prompt, 1), 0.0)
        run(engine)
        assert sequence.first_s is not None
        return sequence.first_s

    assert first_s(8000) / 8000 > 1.2 * first_s(1000) / 1000


def test_decode_slows_with_the_batch() -> None:
    alone = Engine(STEADY)
    single = alone.submit(unique(16, 50), 0.0)
    crowded = Engine(STEADY)
    many = [crowded.submit(unique(16, 50, name), 0.0) for name in range(4)]
    assert gaps(run(alone), single)[20] == pytest.approx(0.011)
    assert gaps(run(crowded), many[0])[20] == pytest.approx(0.014)


def test_a_long_prefill_stretches_the_gaps_of_others() -> None:
    engine = Engine(STEADY)
    chat = engine.submit(unique(16, 60), 0.0)
    engine.advance(0.1)
    engine.submit(unique(4000, 1, name=1), 0.1)
    widest = max(gaps(run(engine, 0.1), chat))
    assert 0.09 < widest < 0.2  # one chunk of 1,024 tokens at 10,000 tokens a second, not the whole prompt


def test_no_more_than_max_num_seqs_run_and_the_queue_is_first_come_first_served() -> None:
    engine = Engine(STEADY)
    sequences = [engine.submit(unique(16, 20, name), 0.001 * name) for name in range(12)]
    assert len(engine.running) <= 4
    assert len(engine.running) + len(engine.waiting) == 12
    run(engine)
    admitted = [sequence.admitted_s for sequence in sequences]
    assert None not in admitted
    assert admitted == sorted(admitted, key=lambda at: at or 0.0)


def test_late_and_rare_calls_change_nothing() -> None:
    def times(step_s: float) -> list[tuple[float, int]]:
        engine = Engine(replace(STEADY, jitter=0.1, spec_acceptance=(0.7, 0.5)), seed=3)
        for name in range(6):
            engine.submit(unique(300, 40, name), 0.0)
        emitted: list[Emission] = []
        now_s = 0.0
        while engine.next_event_s() is not None:
            now_s += step_s
            emitted += engine.advance(now_s)
        return [(emission.at_s, emission.count) for emission in emitted]

    assert times(0.0005) == times(0.7)


def test_the_seed_decides_everything() -> None:
    def times(seed: int) -> list[float]:
        engine = Engine(replace(STEADY, jitter=0.1), seed)
        engine.submit(unique(100, 30), 0.0)
        return [emission.at_s for emission in run(engine)]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_speculation_gives_several_tokens_at_once_and_never_too_many() -> None:
    engine = Engine(replace(STEADY, spec_acceptance=(0.9, 0.8, 0.7)), seed=5)
    sequences = [engine.submit(unique(64, 101, name), 0.0) for name in range(3)]
    emitted = run(engine)
    for sequence in sequences:
        counts = [emission.count for emission in emitted if emission.sequence is sequence]
        assert sum(counts) == 101
        assert counts[0] == 1
        assert max(counts) > 1
    done = engine.counters
    assert done.accepted_tokens == sum(done.accepted_per_position)
    assert done.draft_tokens == 3 * done.drafts
    assert done.accepted_per_position == sorted(done.accepted_per_position, reverse=True)
    assert done.accepted_per_position[0] / done.drafts == pytest.approx(0.9, abs=0.12)


# -- the KV cache


def test_a_repeated_prompt_is_found_in_whole_blocks_but_for_its_last_token() -> None:
    engine = Engine(STEADY)
    engine.submit(unique(1000, 2), 0.0)
    run(engine)
    again = engine.submit(unique(1000, 2), 10.0)
    exact = engine.submit(unique(992, 2), 10.0)
    run(engine, 10.0)
    assert again.cached_tokens == 992
    assert exact.cached_tokens == 976  # 992 is a whole number of blocks: the last one must be computed
    assert engine.counters.prefix_hits == 992 + 976
    assert engine.counters.prefix_queries == 1000 + 1000 + 992


def test_a_cached_prompt_answers_sooner() -> None:
    engine = Engine(STEADY)
    cold = engine.submit(unique(4000, 2), 0.0)
    run(engine)
    warm = engine.submit(unique(4000, 2), 10.0)
    run(engine, 10.0)
    assert cold.first_s is not None
    assert warm.first_s is not None
    assert warm.first_s - 10.0 < cold.first_s / 5


def test_the_least_recently_used_prefix_goes_first() -> None:
    engine = Engine(replace(STEADY, kv_tokens=8192, max_num_seqs=1))
    for at_s, name in enumerate((1, 2, 1, 3)):  # 1 is used again before 3 needs room: 2 has to go
        engine.submit(unique(3200, 1, name), at_s * 10.0)
        run(engine, at_s * 10.0)
    first = engine.submit(unique(3200, 1, 1), 100.0)
    run(engine, 100.0)
    second = engine.submit(unique(3200, 1, 2), 200.0)
    run(engine, 200.0)
    assert first.cached_tokens == 3184
    assert second.cached_tokens < 3184


def test_a_full_cache_preempts_the_newest_and_computes_it_again() -> None:
    engine = Engine(replace(STEADY, context_tokens=2048, kv_tokens=2048, chunk_tokens=2048))
    old = engine.submit(unique(600, 600, 1), 0.0)
    new = engine.submit(unique(600, 600, 2), 0.0)
    emitted = run(engine)
    assert engine.counters.preemptions > 0
    assert old.preemptions == 0
    assert new.preemptions > 0
    assert sum(emission.count for emission in emitted if emission.sequence is new) == 600


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    engine = Engine(replace(STEADY, context_tokens=4096, kv_tokens=4096))
    engine.submit(unique(2500, 100, 1), 0.0)
    large = engine.submit(unique(3000, 1, 2), 0.0)
    small = engine.submit(unique(16, 1, 3), 0.0)
    run(engine)
    assert large.admitted_s is not None
    assert small.admitted_s is not None
    assert small.admitted_s >= large.admitted_s


def test_a_cancelled_request_gives_its_blocks_back() -> None:
    engine = Engine(STEADY)
    running = engine.submit(unique(1000, 500, 1), 0.0)
    others = [engine.submit(unique(16, 5, name), 0.0) for name in range(2, 7)]
    engine.advance(0.2)
    engine.cancel(running, 0.2)
    engine.cancel(others[-1], 0.2)
    engine.cancel(running, 0.2)  # twice is once
    emitted = run(engine, 0.2)
    assert running.state == others[-1].state == "cancelled"
    assert not any(emission.sequence is running for emission in emitted)
    assert engine.kv_usage == 0
    assert engine.counters.cancelled == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 120), st.integers(0, 3), st.floats(0, 0.4), st.booleans()),
        max_size=14,
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_token_leaves_once_and_every_block_comes_back(
    asked: list[tuple[int, int, int, float, bool]], drafts: int, prefix_cache: bool
) -> None:
    config = replace(
        STEADY,
        context_tokens=1024,
        kv_tokens=1024,
        spec_acceptance=(0.6,) * drafts,
        prefix_cache=prefix_cache,
        jitter=0.2,
    )
    engine = Engine(config, seed=drafts)
    now_s = 0.0
    emitted: list[Emission] = []
    sequences: list[tuple[Sequence, bool]] = []
    for prompt, output, name, pause_s, cancel in asked:
        now_s += pause_s
        sequences.append((engine.submit(unique(prompt, output, name), now_s), cancel))
        engine.check()
        if cancel and len(sequences) > 1:
            engine.cancel(sequences[-2][0], now_s)
            engine.check()
        emitted += engine.advance(now_s)
    emitted += run(engine, now_s)
    times = [emission.at_s for emission in emitted]
    assert times == sorted(times)
    for sequence, _ in sequences:
        mine = [emission for emission in emitted if emission.sequence is sequence]
        assert sequence.state in ("finished", "cancelled")
        if sequence.state == "finished":
            assert sum(emission.count for emission in mine) == sequence.request.output_tokens
            assert [emission.finished for emission in mine] == [False] * (len(mine) - 1) + [True]
        assert sequence.cached_tokens < sequence.request.prompt_tokens
    assert engine.kv_usage == 0
    done = engine.counters
    assert done.finished + done.cancelled == len(sequences)
    assert done.generation_tokens == sum(emission.count for emission in emitted)


def test_what_cannot_be_served_is_refused_before_it_is_queued() -> None:
    engine = Engine(STEADY)
    with pytest.raises(ValueError, match="context"):
        engine.submit(SimRequest(8000, 500), 0.0)
    with pytest.raises(ValueError, match="kv_tokens"):
        Engine(replace(STEADY, kv_tokens=4096))


# -- memory


def test_claims_have_four_parts_that_behave_differently() -> None:
    memory = MemoryConfig(
        weights_bytes=1_000_000, kv_bytes_per_token=10, kv_reserved=False, transient_bytes_per_token=3,
        ratchet_bytes_per_token=5, leak_bytes_per_request=7,
    )  # fmt: skip
    engine = Engine(replace(STEADY, memory=memory))
    assert engine.claims().total == 1_000_000
    engine.submit(unique(2000, 50, 1), 0.0)
    engine.advance(0.5)
    busy = engine.claims()
    run(engine, 0.5)
    idle = engine.claims()
    assert busy.transient >= 2000 * 3
    assert idle.transient == 0
    assert busy.kv >= 2000 * 10
    assert idle.kv == 2000 * 10  # the prefix cache keeps the prompt's blocks
    assert idle.ratchet >= 2000 * 5
    assert idle.leak == 7
    engine.submit(unique(500, 5, 2), 10.0)
    run(engine, 10.0)
    after = engine.claims()
    assert after.ratchet == idle.ratchet
    assert after.leak == 14
    engine.submit(unique(4000, 5, 3), 20.0)
    run(engine, 20.0)
    assert engine.claims().ratchet > after.ratchet


def test_a_reserved_cache_is_claimed_from_the_start() -> None:
    engine = Engine(replace(STEADY, memory=MemoryConfig(kv_bytes_per_token=10)))
    before = engine.claims().kv
    engine.submit(unique(2000, 5), 0.0)
    run(engine)
    assert before == engine.claims().kv == STEADY.kv_tokens * 10


# -- faults of the engine


def test_a_stall_delays_everything_once() -> None:
    plain, stalled = Engine(STEADY), Engine(STEADY)
    for engine in (plain, stalled):
        engine.submit(unique(16, 100), 0.0)
    stalled.advance(0.3)
    stalled.stall(0.3, 5.0)
    usual = [emission.at_s for emission in run(plain)]
    late = [emission.at_s for emission in run(stalled, 0.3)]
    assert late[-1] == pytest.approx(usual[-1] + 5.0)


def test_a_hung_engine_takes_requests_and_answers_none_until_it_resumes() -> None:
    engine = Engine(STEADY)
    engine.submit(unique(16, 5, 1), 0.0)
    engine.hang(0.0)
    engine.submit(unique(16, 5, 2), 1.0)
    assert engine.next_event_s() is None
    assert engine.advance(1000.0) == []
    engine.resume(1000.0)
    emitted = run(engine, 1000.0)
    assert sum(emission.count for emission in emitted) == 10
    assert min(emission.at_s for emission in emitted) >= 1000.0


def test_slow_down_multiplies_step_times() -> None:
    engine = Engine(STEADY)
    engine.slow_factor = 3.0
    sequence = engine.submit(unique(16, 10), 0.0)
    assert gaps(run(engine), sequence)[3] == pytest.approx(0.033)


# -- tokens


@given(st.text())
def test_pieces_joined_are_the_text_and_as_many_as_its_tokens(text: str) -> None:
    found = pieces(text)
    assert len(found) == len(tokens(text))
    if text.strip():
        assert "".join(found) == text
    assert [piece.strip() for piece in found] == tokens(text)


@given(st.lists(st.from_regex(r"[a-z]{1,12}", fullmatch=True), max_size=50), st.integers(1, 20))
def test_words_are_exactly_additive(words: list[str], more: int) -> None:
    one = conversation([("user", " ".join(words))])
    assert len(one) == TEMPLATE_TOKENS + MESSAGE_TOKENS + len(words)
    assert len(conversation([("user", " ".join([*words, *["word"] * more]))])) == len(one) + more


def test_what_is_no_word_counts_by_characters() -> None:
    assert len(tokens("3f9a0c11d2e4")) == 12 / CHARACTERS
    assert len(tokens("7 6 5")) == 3
    assert len(tokens("x" * 40)) == 10


def test_equal_prefixes_have_equal_blocks() -> None:
    one = tokens("a b c d e f g h i")
    other = tokens("a b c d e f X h i")
    assert block_hashes(one, 2)[:3] == block_hashes(other, 2)[:3]
    assert block_hashes(one, 2)[3] != block_hashes(other, 2)[3]
    assert len(block_hashes(one, 2)) == 4


# -- answers


def ask(text: str, max_tokens: int = 256, **more: object) -> str:
    return "".join(reply(Prompt((("user", text),)), 0, max_tokens, **more).content)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("[3f9a0c11d2e4]\nWhat is 417 + 86? Answer with the integer only.", "503"),
        ("What is 86 - 417? Answer with the integer only.", "-331"),
        ("What is 17 * 23? Answer with the integer only.", "391"),
        ("What is -5 - -7? Answer with the integer only.", "2"),
        ("Repeat exactly: the quick\n  brown fox", "the quick\n  brown fox"),
        (
            "iron river\nregister amber fox holds 1 2 3 4 5 6 7\nfiller words\nregister amber dog holds 7 6 5 4 3 2 1\n"
            "Which number does register amber dog hold? Answer with its seven digits only.",
            "7654321",
        ),
        ("register iron-lake holds 4711\nwhat number is in register iron-lake?", "4711"),
    ],
)
def test_known_tasks_are_answered_right(question: str, answer: str) -> None:
    assert ask(question) == answer


def test_json_is_built_from_the_given_fields() -> None:
    text = (
        "Write one JSON object with exactly these fields. Answer with the JSON object only.\nfields:\n"
        'name = "Ada \\"x\\" L"\ncount = 3\ntags = ["a", "b"]\nnested = {"deep": [1, null]}\nok = true'
    )
    assert json.loads(ask(text)) == {
        "name": 'Ada "x" L', "count": 3, "tags": ["a", "b"], "nested": {"deep": [1, None]}, "ok": True
    }  # fmt: skip


def test_a_code_is_echoed_first() -> None:
    assert ask("Tell me of pumps.\nBegin your answer with this code: 3f9a0c11").startswith("3f9a0c11 ")


@pytest.mark.parametrize("task", ["Write a story about a harbor.", "Write a Python program that sorts orders."])
def test_free_text_has_its_exact_length_and_is_not_degenerate(task: str) -> None:
    answer = reply(Prompt((("user", task),)), 0, 3000, ignore_eos=True)
    text = "".join(answer.content)
    assert (answer.tokens, answer.finish) == (3000, "length")
    assert len(tokens(text)) == 3000
    windows = [text[at : at + 1500].encode() for at in range(0, len(text) - 1500, 250)]
    assert min(len(zlib.compress(window)) / len(window) for window in windows) > 0.1


def test_reasoning_leaves_room_for_the_answer() -> None:
    prompt = Prompt((("user", "What is 2 + 2? Answer with the integer only."),))
    roomy = reply(prompt, 0, 100, reasoning=20)
    tight = reply(prompt, 0, 5, reasoning=20)
    assert (len(roomy.reasoning), "".join(roomy.content)) == (20, "4")
    assert (len(tight.reasoning), "".join(tight.content), tight.tokens) == (4, "4", 5)


def test_tools_are_called_with_arguments_that_satisfy_the_schema() -> None:
    tool = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer"}
            },
            "required": ["city", "unit", "days"],
        },
    }  # fmt: skip
    prompt = Prompt((("user", "What is the weather in Paris for 3 days, in kelvin?"),), (tool,), "auto")
    answer = reply(prompt, 0, 100)
    assert (answer.tool, answer.finish) == ("get_weather", "tool_calls")
    assert json.loads("".join(answer.content)) == {"city": "Paris", "unit": "kelvin", "days": 3}


@pytest.mark.parametrize("how", ["exclaim", "loop", "wrong_answer", "swapped", "cut_json", "reasoning_only", "empty"])
def test_each_corruption_is_wrong(how: str) -> None:
    prompt = Prompt((("user", 'JSON please. fields:\nnumber = 4711\nname = "a long enough name"'),))
    honest = reply(prompt, 0, 64)
    spoilt = answers.corrupted(reply(prompt, 0, 64), how, prompt, "another answer", 64)
    assert "".join(spoilt.content) != "".join(honest.content)
    assert 1 <= spoilt.tokens <= 64


def test_a_wrong_needle_is_another_register() -> None:
    question = "register a b holds 1 2 3\nregister c d holds 4 5 6\nWhich number does register a b hold?"
    prompt = Prompt((("user", question),))
    spoilt = answers.corrupted(reply(prompt, 0, 64), "wrong_answer", prompt, "", 64)
    assert "".join(spoilt.content) == "456"


@pytest.mark.parametrize("name", ["arithmetic", "json", "long_context", "chat_short", "generate"])
def test_the_workloads_of_this_repository_grade_as_right(name: str) -> None:
    workload = importlib.import_module(f"workloads.{name}")
    for session in islice(workload.sessions(workload.Options(), Draw(1, name, "salt", 10)), 12):
        request = next(session)
        prompt = Prompt(tuple((message["role"], message["content"]) for message in request.messages))
        said = reply(prompt, 0, request.max_tokens, ignore_eos=request.ignore_eos)
        outcome = Outcome(request.id, request.cls, "measure", 0, request.cache, "ok", 0)
        outcome.text, outcome.finish_reason, outcome.output_tokens = "".join(said.content), said.finish, said.tokens
        for grader in {request.grader or "degenerate", "degenerate"}:
            grade = importlib.import_module(f"workloads.graders.{grader}").grade(request, outcome)
            assert grade.ok, (outcome.text, grade)


# -- presets and scripts


@pytest.mark.parametrize("name", config.preset_names())
def test_every_preset_loads_and_can_serve(name: str) -> None:
    preset = config.load_preset(name)
    engine = Engine(preset.engine)
    engine.submit(SimRequest(1000, 10), 0.0)
    assert sum(emission.count for emission in run(engine)) == 10
    assert preset.about
    assert engine.claims().total * preset.memory_scale <= preset.memory_limit_mib * config.MIB


def test_tiny_is_as_fast_as_a_first_run_needs() -> None:
    engine = Engine(config.load_preset("tiny").engine)
    chat = engine.submit(unique(100, 100, 1), 0.0)
    emitted = run(engine)
    assert 100 < 99 / sum(gaps(emitted, chat)) < 250
    long = engine.submit(unique(8192, 8, 2), 100.0)
    run(engine, 100.0)
    assert long.first_s is not None
    assert long.first_s - 100.0 < 0.6


def test_gb10_has_the_speeds_that_were_seen() -> None:
    engine = Engine(config.load_preset("gb10-262k").engine)
    deep = engine.submit(unique(261_000, 200), 0.0)
    emitted = run(engine)
    assert deep.first_s is not None
    assert 1000 < 261_000 / deep.first_s < 1500
    chat = engine.submit(unique(100, 400, 1), 1000.0)
    emitted = run(engine, 1000.0)
    assert 30 < 399 / sum(gaps(emitted, chat)) < 60


def test_a_preset_with_a_mistake_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("engine: {contxt_tokens: 5}\n")
    with pytest.raises(UserError, match=r'mine\.yaml: engine\.contxt_tokens: unknown key.*"context_tokens"'):
        config.load_preset(str(path))
    path.write_text("engine: {context_tokens: 99999999}\n")
    with pytest.raises(UserError, match=r"engine\.kv_tokens"):
        config.load_preset(str(path))
    path.write_text("time_scale: 0\n")
    with pytest.raises(UserError, match="time_scale"):
        config.load_preset(str(path))
    with pytest.raises(UserError, match='did you mean "tiny"'):
        config.load_preset("tinny")


def test_a_script_of_faults_is_read() -> None:
    entry = {"at": "5m", "kind": "crash", "restart_after": "20s"}
    assert faults.fault(entry, "x") == faults.Fault(faults.Crash(restart_after=Seconds(20)), 300.0, None)
    counted = faults.fault({"after_requests": 50, "kind": "corrupt", "how": "loop"}, "x")
    assert counted == faults.Fault(faults.Corrupt("loop"), None, 50)
    assert [faults.fault({"kind": kind}, "x").kind for kind in faults.KINDS] == list(faults.KINDS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("faults: [{at: 5, kind: crush}]", r'faults\.0: unknown kind "crush"; did you mean "crash"'),
        ("faults: [{at: 5, kind: crash, restart: 3}]", r'faults\.0: restart: unknown key "restart"'),
        ("faults: [{at: soon, kind: crash}]", r"faults\.0: at: expected a duration"),
        ("faults: [{at: 1, after_requests: 2, kind: crash}]", "exclude each other"),
        ("faults: [{after_requests: x, kind: crash}]", "after_requests: expected a number"),
        ("faults: [{kind: corrupt, how: badly}]", r"faults\.0: how: "),
        ("faults: [{kind: slow_down, factor: 0}]", "factor: expected a number above 0"),
        ("fault: []", 'unknown key "fault"; did you mean "faults"'),
        ("- 3", "expected a mapping"),
        ("faults: [", "not YAML"),
    ],
)
def test_a_script_with_a_mistake_is_one_clear_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        faults.load_script(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_readme_lists_every_preset_fault_and_option() -> None:
    readme = (Path(config.__file__).parent / "README.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in readme.splitlines() if line[:3] == "| `"
    ]
    presets = {row[0].strip("` |"): row for row in rows if row[0].strip("` |") in config.preset_names()}
    kinds = {row[0].strip("` |"): row for row in rows if row[0].strip("` |") in faults.KINDS}
    assert presets.keys() == set(config.preset_names())
    assert kinds.keys() == faults.KINDS.keys()
    assert len(rows) == len(presets) + len(kinds)
    for name, row in presets.items():
        preset = config.load_preset(name)
        assert row[2].strip("| ") == f"{preset.time_scale:g}, {preset.memory_scale:g}"
    for name, row in kinds.items():
        options = re.sub(r"\([^)]*\)", "", row[1])
        assert set(re.findall(r"`(\w+)`", options)) == {option.name for option in fields(faults.KINDS[name])}
    for how in get_args(faults.Corruption):
        assert f"`{how}`" in kinds["corrupt"][2]
