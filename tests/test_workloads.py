"""What every class of requests promises, and what each asks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import plugins
from loadgen.types import Draw, Outcome, Request, Tokens, UserError
from workloads import arithmetic, chat_short, generate, long_context, turns, words

NAMES = plugins.names("workloads")
FOLDER = Path(turns.__file__).parent

# every class, and every class asked twice: what the promises below must hold for
CASES: list[tuple[str, dict[str, Any]]] = [(name, extra) for name in NAMES for extra in ({}, {"repeat": 2})]


def answered(request: Request, word: str = "ok") -> Outcome:
    """An outcome of the request, as far as a session looks at it."""
    return Outcome(request.id, request.cls, "measure", 0, request.cache, word, 0)  # type: ignore[arg-type]


def turns_of(module: ModuleType, options: Any, draw: Draw, items: int) -> list[list[Request]]:
    """The requests of the first sessions, each answered well."""
    found = []
    for session in islice(module.sessions(options, draw), items):
        requests = [next(session)]
        while True:
            try:
                requests.append(session.send(answered(requests[-1])))
            except StopIteration:
                break
        found.append(requests)
    return found


def asked(name: str, items: int = 6, *, seed: int = 1, salt: str = "tonight", **options: Any) -> list[Request]:
    module = plugins.load("workloads", name)
    draw = Draw(seed=seed, cls=name, salt=salt, template_tokens=30)
    made = plugins.options(module, options)
    return [request for requests in turns_of(module, made, draw, items) for request in requests]


def text(request: Request) -> str:
    return str(request.messages[0]["content"])


def fingerprint() -> str:
    """Of the first requests of every class; run by another process as well."""
    digest = hashlib.blake2b(digest_size=16)
    for name, extra in CASES:
        for request in asked(name, **extra):
            digest.update(json.dumps(dataclasses.asdict(request), ensure_ascii=False).encode())
    return digest.hexdigest()


# -- what every class promises


@pytest.mark.parametrize(("name", "extra"), CASES)
def test_request_ids_are_unique_and_name_class_and_item(name: str, extra: dict[str, Any]) -> None:
    ids = [request.id for request in asked(name, 12, **extra)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"{name}-\d{{6}}(\.\d+)?", identity) for identity in ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_asks_for_what_the_options_say(name: str) -> None:
    for request in asked(name, 12, max_tokens=77):
        assert request.cls == name
        assert request.max_tokens == 77
        assert request.messages[-1]["role"] == "user"
        assert request.grader is None or request.grader in plugins.names("graders")
        assert (request.phase, request.seat, request.due_ns) == ("", -1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_cold_prompts_share_no_head_with_another_item_or_another_run(name: str) -> None:
    heads = {text(request)[:14] for salt in ("tonight", "tomorrow") for request in asked(name, 20, salt=salt)}
    assert len(heads) == 40


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_prompt_is_first_cold_then_warm_and_byte_identical(name: str) -> None:
    requests = asked(name, 3, repeat=3)
    assert [request.cache for request in requests] == ["cold", "warm", "warm"] * 3
    assert [request.id.rpartition(".")[2] for request in requests] == ["0", "1", "2"] * 3
    for cold, *warm in (requests[0:3], requests[3:6], requests[6:9]):
        assert all((w.messages, w.expect, w.extra_body) == (cold.messages, cold.expect, cold.extra_body) for w in warm)


@pytest.mark.parametrize("name", NAMES)
def test_no_warm_request_follows_a_cold_one_that_failed(name: str) -> None:
    module = plugins.load("workloads", name)
    session = next(iter(module.sessions(plugins.options(module, {"repeat": 3}), Draw(1, name, "s"))))
    with pytest.raises(StopIteration):
        session.send(answered(next(session), "failed"))


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_prompt_that_a_class_accepts_holds_whole_questions(name: str) -> None:
    """Preflight shrinks a class to what the server can take, down to MIN_PROMPT_TOKENS, by this one field."""
    module = plugins.load("workloads", name)
    options = dataclasses.replace(module.Options(), prompt_tokens=module.MIN_PROMPT_TOKENS)
    draw = Draw(seed=1, cls=name, salt="s", template_tokens=30)
    for (request,) in turns_of(module, options, draw, 100):
        if name == "long_context":
            assert len(re.findall(r"[a-z]+|[^\sa-z]|\n", text(request).lower())) + 30 <= module.MIN_PROMPT_TOKENS
        else:
            assert turns.most_tokens(text(request), draw) <= module.MIN_PROMPT_TOKENS


@pytest.mark.parametrize("name", NAMES)
def test_an_item_depends_on_nothing_but_options_draw_and_its_number(name: str) -> None:
    alone = asked(name, 4)[3]
    module = plugins.load("workloads", name)
    draw = Draw(seed=1, cls=name, salt="tonight", template_tokens=30)
    sessions = list(islice(module.sessions(plugins.options(module, {}), draw), 4))
    assert next(sessions[3]) == alone


def test_requests_are_byte_identical_in_another_process_with_another_hash_seed() -> None:
    program = "from test_workloads import fingerprint; print(fingerprint())"
    paths = os.pathsep.join((str(Path(__file__).parent), str(FOLDER.parent)))
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == fingerprint()


def test_another_seed_asks_other_questions() -> None:
    for name in NAMES:
        one, other = ({text(request).partition("\n")[2] for request in asked(name, 10, seed=seed)} for seed in (1, 2))
        assert one != other


# -- what each asks


def test_sums_have_operands_of_the_asked_digits_and_the_right_answer() -> None:
    seen = set()
    for request in asked("arithmetic", 60, digits=2, operators="+-*"):
        found = re.search(r"\nWhat is (\d\d) ([-+*]) (\d\d)\? Answer with the integer only\.$", text(request))
        assert found
        seen.add(found[2])
        a, b = int(found[1]), int(found[3])
        assert request.expect == {"integer": {"+": a + b, "-": a - b, "*": a * b}[found[2]]}
    assert seen == set("+-*")


def test_objects_are_spelled_in_lines_that_parse_to_the_expected() -> None:
    for request in asked("json", 40):
        lines = text(request).partition("\nfields:\n")[2].split("\n")
        parsed = {name: json.loads(value) for name, _, value in (line.partition(" = ") for line in lines)}
        assert parsed == request.expect["object"]
        assert [type(value) for value in parsed.values()] == [str, int, bool, list]


def test_objects_lose_fields_rather_than_exceed_the_prompt() -> None:
    draw = Draw(1, "json", "s", 30)
    sizes = set()
    for request in asked("json", 20, fields=20, prompt_tokens=220):
        assert turns.most_tokens(text(request), draw) <= 220
        sizes.add(len(request.expect["object"]))
    assert max(sizes) < 20
    assert min(sizes) > 4


def test_chat_lengths_are_mixed_and_bounded() -> None:
    draw = Draw(1, "chat_short", "tonight", 30)
    lengths = [turns.most_tokens(text(request), draw) for request in asked("chat_short", 200, prompt_tokens=400)]
    assert max(lengths) <= 400
    assert max(lengths) > 3 * min(lengths)
    assert len(set(lengths)) > 60


def test_chat_with_echo_asks_for_its_own_code() -> None:
    requests = asked("chat_short", 20, echo=True)
    assert all(text(r).endswith(f"\nBegin your answer with this code: {r.expect['text']}") for r in requests)
    assert all(request.grader == "contains" for request in requests)
    assert len({request.expect["text"] for request in requests}) == 20


def test_generated_length_is_max_tokens_whatever_the_model_would_like() -> None:
    requests = asked("generate", 30, kinds=("code", "prose", "chinese"))
    assert all(request.ignore_eos and request.grader == "length" for request in requests)
    assert Counter(request.tags["kind"] for request in requests) == {"code": 10, "prose": 10, "chinese": 10}
    chinese = [text(request) for request in requests if request.tags["kind"] == "chinese"]
    assert all(re.search("[\u4e00-\u9fff]{5}", prompt) for prompt in chinese)


def test_needles_stand_at_the_beginning_the_middle_and_the_end() -> None:
    for at, request in enumerate(asked("long_context", 9, prompt_tokens=2000)):
        prompt = text(request)
        key = re.search(r"about register (\w+ \w+)\. Which number does register \1 hold\?", prompt)
        assert key
        place = prompt.index(f"register {key[1]} holds {request.expect['value']}") / len(prompt)
        low, high = [(0.0, 0.05), (0.45, 0.55), (0.95, 1.0)][at % 3]
        assert low <= place <= high
        assert request.tags == {"depth": str((0, 50, 100)[at % 3])}
        assert prompt.count(" holds ") == 5
        assert all(prompt.count(f" holds {value}\n") == 1 for value in request.expect["distractors"])


@settings(max_examples=60)
@given(st.integers(0, 400), st.integers(1, 40), st.booleans())
def test_registers_of_a_prompt_cannot_be_taken_for_one_another(seed: int, distractors: int, spaced: bool) -> None:
    options = long_context.Options(distractors=distractors, spaced=spaced)
    request = long_context.frame_probe(options, Draw(seed=seed, cls="long_context", salt="s"))
    found = re.findall(r"register (\w\w)\w* \w+ holds ([\d ]+)\n", text(request))
    values = [value.replace(" ", "") for _, value in found]
    assert len(found) == distractors + 1
    assert len({key for key, _ in found}) == distractors + 1
    assert all(len(value) == 7 for value in values)
    assert all(
        sum(a != b for a, b in zip(one, other, strict=True)) >= 3
        for at, one in enumerate(values)
        for other in values[:at]
    )


def counted(prompt: str) -> int:
    """A vocabulary that is cruel to everything but the words of the list: two tokens per other word, one per digit,
    mark and line break, and one for the space before a number."""
    known = set(words.WORDS)
    pieces = re.findall(r"[A-Za-z]+|[^\sA-Za-z]|\n| (?=[0-9])", prompt)
    return sum(2 if piece.isalpha() and piece not in known else 1 for piece in pieces)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("target", [512, 2048, 8192, 12288, 261_632])
def test_a_measured_frame_makes_every_prompt_exact(target: int, spaced: bool) -> None:
    """The server's own count is the judge; here a vocabulary of the test's own, with a template of 30 tokens."""
    options = long_context.Options(prompt_tokens=Tokens(target), spaced=spaced)
    draw = Draw(seed=5, cls="long_context", salt="s", template_tokens=30)
    probes = [long_context.frame_probe(options, draw, number) for number in range(3)]
    frames = {30 + counted(text(probe)) - probe.expect["words"] for probe in probes}
    assert len(frames) == 1
    options = dataclasses.replace(options, frame_tokens=frames.pop())
    for request in islice(
        (next(session) for session in long_context.sessions(options, draw)), 3 if target > 9999 else 9
    ):
        assert request.prompt_tokens == target
        assert 30 + counted(text(request)) == target


def test_an_unmeasured_frame_claims_no_exact_length() -> None:
    assert {request.prompt_tokens for request in asked("long_context", 3)} == {None}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("arithmetic", {"digits": 0}, "choose 1 to 6"),
        ("arithmetic", {"operators": "/"}, "choose from + - *"),
        ("json", {"fields": 0}, "choose 1 to 20"),
        ("generate", {"kinds": ["poems"]}, "poems; choose from code, prose, chinese"),
        ("long_context", {"depths": [120]}, "choose percentages"),
        ("long_context", {"distractors": 0}, "choose 1 to 40"),
        ("long_context", {"prompt_tokens": 100}, "raise it or lower distractors"),
    ],
)
def test_a_wrong_option_is_one_clear_line_before_the_first_request(
    name: str, options: dict[str, Any], says: str
) -> None:
    module = plugins.load("workloads", name)
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        module.sessions(plugins.options(module, options), Draw(1, name, "s"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("module", [arithmetic, chat_short, generate])
def test_questions_do_not_run_out(module: ModuleType) -> None:
    draw = Draw(seed=1, cls="c", salt="s")
    later = next(islice(module.sessions(module.Options(), draw), 20_000, None))
    assert next(later).id == "c-020000"


# -- the README's tables


def table(first: str) -> dict[str, list[str]]:
    """The rows of the README's table whose head begins with this word: name → its other cells."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    head = page.index(f"\n| {first} |") + 1
    rows = page[head : page.index("\n\n", head)].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return {name.strip("`"): rest for name, *rest in cells}


def test_readme_names_every_class_with_its_options_minimum_and_grader() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert page.count("| class |") == 2  # the reference and the forms
    rows = table("class")
    assert list(rows) == NAMES
    for name, (options, smallest, grader, _) in rows.items():
        module = plugins.load("workloads", name)
        fields = dataclasses.fields(module.Options)
        assert options == ", ".join(f"`{field.name}: {json.dumps(field.default)}`" for field in fields)
        assert int(smallest) == module.MIN_PROMPT_TOKENS
        assert {request.grader for request in asked(name)} == {None if grader[0] == "n" else grader.strip("`")}


def test_readme_names_every_grader_with_what_it_expects_and_the_kinds_it_gives() -> None:
    rows = table("grader")
    assert list(rows) == plugins.names("graders")
    for name, (expects, kinds) in rows.items():
        source = (FOLDER / "graders" / f"{name}.py").read_text(encoding="utf-8")
        used = set(re.findall(r'expect(?:\.get\(|\[)"(\w+)"', source))
        assert used == set(re.findall(r"`(\w+)`", expects))
        words_of = set(re.findall(r'"(wrong|distractor|garbage|degenerate|empty|malformed)"', source))
        if " empty(" in source:
            words_of |= {"empty", "wrong"}
        assert ", ".join(sorted(words_of)) == kinds.replace("`", "")
