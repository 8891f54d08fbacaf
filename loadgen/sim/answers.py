"""What the simulated model says: it reads the prompt and really does the graded tasks, else it writes plain prose.

Recognised by form, leniently, in the last user message (registers anywhere): sums, JSON from given fields, the number
in a register, exact repetition, a code to begin with, and calls of offered tools. Everything depends on the prompt and
the seed alone.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from loadgen.sim.tokens import pieces
from loadgen.types import Json

Finish = Literal["stop", "length", "tool_calls"]

_SUM = re.compile(r"(?<![\w.])(-?\d+)\s*([-+*×x])\s*(-?\d+)(?![\w.]*\d)")
_SUM_ASKED = re.compile(r"\b(?:what is|compute|calculate|work out|how much is)\b", re.IGNORECASE)
_REGISTER_BEFORE = re.compile(r"\bregister\s+([a-z]+(?:[\s-]+[a-z]+)?)$", re.IGNORECASE)
_DIGITS = re.compile(r"\d(?:[\d ]*\d)?")
_ASKED_REGISTER = re.compile(r"\bregister\s+([a-z]+(?:[\s-]+[a-z]+)?)\s+hold\b", re.IGNORECASE)
_IS_REGISTER = re.compile(r"\bin register\s+([a-z]+[\s-]+[a-z]+)", re.IGNORECASE)
_REPEAT = re.compile(r"\brepeat (?:this |the following )?(?:text )?(?:exactly|verbatim)[^:\n]*:\s*(.+)", re.I | re.S)
_CODE = re.compile(
    r"\b(?:begin|start) your (?:answer|reply) with (?:this|the) (?:code|nonce|word):?\s+(\S+)", re.IGNORECASE
)
_FIELD = re.compile(r"^\s*[-*]?\s*\"?([A-Za-z_]\w*)\"?\s*[=:]\s*(.+?)\s*,?\s*$")
_WORDS = re.compile(r"\b(?:exactly|in|about)\s+(\d{1,5})\s+words\b", re.IGNORECASE)
_BRIEF = re.compile(r"\b(?:one sentence|briefly|in short|short answer|one line)\b", re.IGNORECASE)
_CODING = re.compile(r"\b(?:python|code|function|class|implement|program|script)\b", re.IGNORECASE)

SHORT_ANSWER = (12, 40)  # tokens, the usual range of a brief answer
CHAT_ANSWER = (60, 160)
HOLDS = " holds "
REACH = 64  # characters before it that the name of a register may fill
HEAD = 1000  # characters of a long question in which an instruction may stand
TAIL = 3000
MAX_GARBAGE = 2048  # tokens of a degenerate answer, where the request sets no limit worth the name


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model sees it: roles with their text, and the tools that it may call."""

    messages: tuple[tuple[str, str], ...]
    tools: tuple[Json, ...] = ()
    tool_choice: str = "none"
    """`none`, `auto`, `required`, or the name of the one tool to call."""

    @property
    def instruction(self) -> str:
        """Where a task is looked for: the head and the tail of the question. What is between is material."""
        question = self.question
        return question if len(question) <= HEAD + TAIL else f"{question[:HEAD]}\n{question[-TAIL:]}"

    @property
    def question(self) -> str:
        """The last thing that a user said (a completion prompt counts as that)."""
        for role, text in reversed(self.messages):
            if role == "user":
                return text
        return self.messages[-1][1] if self.messages else ""


@dataclass(slots=True)
class Reply:
    """An answer, token by token. With `tool` the content is the arguments of that call."""

    reasoning: list[str]
    content: list[str]
    finish: Finish
    tool: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.reasoning) + len(self.content)


def reply(
    prompt: Prompt, seed: int, max_tokens: int, *, min_tokens: int = 0, ignore_eos: bool = False, reasoning: int = 0
) -> Reply:
    """The whole answer within `max_tokens`; exactly that many with `ignore_eos`. At least one token.

    Of reasoning only so much is thought as leaves room for the answer: a model that knows its budget.
    """
    question = prompt.question
    random = Random(zlib.crc32(question.encode(), seed & 0xFFFFFFFF))
    tool = _chosen_tool(prompt)
    if tool is not None:
        content = pieces(json.dumps(_arguments(tool.get("parameters") or {}, question, random), ensure_ascii=False))
        finish: Finish = "tool_calls"
    else:
        text = solve(prompt)
        content = pieces(text) if text is not None else _chat(prompt.instruction, random)
        finish = "stop"
    wanted = max_tokens if ignore_eos else min(min_tokens, max_tokens)
    thoughts = _prose(random, min(reasoning, max(0, max_tokens - len(content)))) if tool is None else []
    if tool is None and len(thoughts) + len(content) < wanted:
        content = _extended(content, wanted - len(thoughts), prompt.instruction, random)
    room = max_tokens - len(thoughts)
    if len(content) > room or (ignore_eos and tool is None):
        content, finish = content[:room], "length"
    return Reply(thoughts, content, finish, None if tool is None else str(tool["name"]))


def solve(prompt: Prompt, *, distractor: bool = False) -> str | None:
    """The right answer where the task has a known form, else None. `distractor`: the wrong register's number."""
    instruction = prompt.instruction
    code = _CODE.search(instruction)
    if (number := _register(prompt, distractor)) is not None:
        return number
    if _REPEAT.search(instruction) and (repeat := _REPEAT.search(prompt.question)):
        return repeat[1].strip()
    if (fields := _fields(prompt.question)) is not None:
        return fields
    asked = _SUM_ASKED.search(instruction)
    if asked and (found := _SUM.search(instruction, asked.end())):
        left, right = int(found[1]), int(found[3])
        value = left + right if found[2] == "+" else left - right if found[2] == "-" else left * right
        value += 1 if distractor else 0
        return f"{code[1]} {value}" if code else str(value)
    return None


def _register(prompt: Prompt, distractor: bool) -> str | None:
    instruction = prompt.instruction
    asked = _ASKED_REGISTER.findall(instruction) or _IS_REGISTER.findall(instruction)
    if not asked:
        return None
    name = _key(asked[-1])
    held = {key: digits for _, text in prompt.messages for key, digits in _registers(text)}
    if distractor:
        held = {other: digits for other, digits in held.items() if other != name}
        return next(iter(held.values()), "0000000")
    return held.get(name)


def _registers(text: str) -> Iterator[tuple[str, str]]:
    """Every register line. A plain search for its verb comes first: a regex over a megabyte takes 50 ms."""
    at = text.find(HOLDS)
    while at >= 0:
        name = _REGISTER_BEFORE.search(text[max(0, at - REACH) : at])
        digits = _DIGITS.match(text, at + len(HOLDS))
        if name and digits:
            yield _key(name[1]), digits[0].replace(" ", "")
        at = text.find(HOLDS, at + 1)


def _key(name: str) -> str:
    return " ".join(re.split(r"[\s-]+", name.lower()))


def _fields(question: str) -> str | None:
    """`NAME = VALUE` lines after a line that ends in `fields:`, up to the end of the message."""
    _, marker, tail = question.partition("fields:")
    if not marker or "json" not in question[:HEAD].lower():
        return None
    found: Json = {}
    for line in tail.splitlines():
        if match := _FIELD.match(line):
            try:
                found[match[1]] = json.loads(match[2])
            except ValueError:
                found[match[1]] = match[2]
        elif line.strip() and found:
            break
    return json.dumps(found, ensure_ascii=False) if found else None


def _chosen_tool(prompt: Prompt) -> Json | None:
    """Which tool is called: the named one, the first where one is required, else one that the user speaks of."""
    if prompt.tool_choice == "none":
        return None
    by_name = {str(tool.get("name")): tool for tool in prompt.tools}
    if prompt.tool_choice in by_name:
        return by_name[prompt.tool_choice]
    if not by_name or (prompt.messages and prompt.messages[-1][0] == "tool"):
        return None  # the tool has answered: now speaks the model
    spoken = set(re.findall(r"\w+", prompt.question.lower()))
    named = [tool for name, tool in by_name.items() if name.lower() in spoken]
    related = [tool for name, tool in by_name.items() if spoken & set(name.lower().split("_"))]
    if named or related:
        return (named or related)[0]
    return next(iter(by_name.values())) if prompt.tool_choice == "required" else None


def _arguments(schema: Json, question: str, random: Random) -> Json:
    """Arguments that satisfy a flat JSON schema, taken from the question where it holds them."""
    required = schema.get("required") or list(schema.get("properties") or {})
    return {
        name: _argument(name, entry, question, random)
        for name, entry in (schema.get("properties") or {}).items()
        if name in required or re.search(rf"\b{re.escape(name)}\b", question, re.IGNORECASE)
    }


def _argument(name: str, schema: Json, question: str, random: Random) -> object:
    if choices := schema.get("enum"):
        low = question.lower()
        return next((choice for choice in choices if str(choice).lower() in low), choices[0])
    kind = schema.get("type", "string")
    spoken = re.search(
        rf"\b{re.escape(name)}\b[\"'`]?\s*(?:=|:|is|of)?\s*(\"[^\"]*\"|'[^']*'|[^\s,;?]+)", question, re.IGNORECASE
    )
    value = spoken[1].strip("\"'").rstrip(".") if spoken else None
    if kind in ("integer", "number"):
        numbers = [text for text in (value or "", question) for text in re.findall(r"-?\d+(?:\.\d+)?", text)]
        number = float(numbers[0]) if numbers else float(random.randrange(1, 100))
        return int(number) if kind == "integer" else number
    if kind == "boolean":
        return value is None or value.lower() in ("true", "yes", "on")
    if kind == "array":
        return [_argument(name, schema.get("items") or {}, question, random)]
    if kind == "object":
        return _arguments(schema, question, random)
    if value is not None:
        return value
    names = re.findall(r"(?<!^)(?<![.?!] )\b[A-Z][a-z]+\b", question)
    return names[0] if names else random.choice(_NOUNS)


# -- free text: varied enough that no detector of degenerate output may fire


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ADJECTIVES = _words(
    "quiet early narrow bright modest steady distant simple heavy gentle recent careful sudden plain broad useful cold "
    "warm patient local common rare exact open hidden ancient modern slow rapid hollow sturdy"
)
_NOUNS = _words(
    "river engine garden letter bridge winter market signal harbor teacher record village machine window captain "
    "forest lesson answer basket corner doctor evening farmer glacier island journey kettle lantern meadow notebook "
    "orchard pattern question railway shelter theory valley whistle archive bottle cabinet desert factory habit"
)
_VERBS = _words(
    "carries follows reaches explains measures crosses gathers repairs watches shapes limits answers changes "
    "describes supports separates collects improves protects replaces suggests remembers divides brings holds needs"
)
_LINKS = _words("because although while before after unless whenever since so and but")
_OPENERS = (
    "In practice", "As a rule", "For example", "At first", "Later", "In most cases", "Besides", "Over time",
    "By contrast", "In short", "Even so", "On the whole",
)  # fmt: skip


def _sentence(random: Random) -> str:
    def phrase() -> str:
        start = random.choice(("the", "a", "this", "every", "another", "one"))
        middle = f"{random.choice(_ADJECTIVES)} " if random.random() < 0.6 else ""
        return f"{start} {middle}{random.choice(_NOUNS)}"

    text = f"{phrase()} {random.choice(_VERBS)} {phrase()}"
    if random.random() < 0.6:
        text += f" {random.choice(_LINKS)} {phrase()} {random.choice(_VERBS)} {phrase()}"
    if random.random() < 0.3:
        return f"{random.choice(_OPENERS)}, {text}."
    return f"{text[0].upper()}{text[1:]}."


def _statement(random: Random) -> str:
    """A small function of its own: what a model writes when asked for code."""
    verb = random.choice(_VERBS).rstrip("s")
    noun, other, third = random.sample(_NOUNS, 3)
    low, high = random.randrange(2, 90), random.randrange(100, 999)
    return random.choice(
        (
            f"def {verb}_{noun}({other}, limit={high}):\n    total = {low}\n    for {third} in {other}:\n"
            f"        total += {third}.weight * {low}\n    return min(total, limit)",
            f"class {noun.title()}:\n    def __init__(self, {other}):\n        self.{other} = {other}\n\n"
            f"    def {verb}(self):\n        return self.{other}[{low}:{high}]",
            f"def {verb}_{other}({noun}):\n    if not {noun}:\n        raise ValueError('empty {noun}')\n"
            f"    return sorted({noun}, key=lambda {third}: {third}.{other})[:{low}]",
        )
    )


def _prose(random: Random, count: int, code: bool = False) -> list[str]:
    """Exactly `count` tokens of sentences (or of functions)."""
    found: list[str] = []
    while len(found) < count:
        between = "" if not found else "\n\n" if code or random.random() < 0.2 else " "
        found.extend(pieces(between + (_statement(random) if code else _sentence(random))))
    return found[:count]


def _is_coding(question: str) -> bool:
    return _CODING.search(_CODE.sub("", question)) is not None


def _extended(content: list[str], count: int, question: str, random: Random) -> list[str]:
    tail = _prose(random, count - len(content), code=_is_coding(question))
    if content and tail:
        tail[0] = "\n" + tail[0]
    return content + tail


def _chat(question: str, random: Random) -> list[str]:
    code = _CODE.search(question)
    head = pieces(code[1].rstrip(".")) if code else []
    if words := _WORDS.search(question):
        length = int(words[1])
    else:
        length = random.randint(*(SHORT_ANSWER if _BRIEF.search(question) else CHAT_ANSWER))
    body = _prose(random, length, code=_is_coding(question))
    if head and body:
        body[0] = " " + body[0]
    return head + body


# -- silent corruption: status 200, and yet wrong; each kind as it has been seen in the field


def corrupted(reply: Reply, how: str, prompt: Prompt, other: str, max_tokens: int) -> Reply:
    """The answer spoilt. `other` is what was said to somebody else before."""
    content = reply.content
    finish = reply.finish
    text = "".join(content)
    match how:
        case "exclaim":  # placeholder tokens leak, up to the limit
            content, finish = ["!"] * min(max_tokens, MAX_GARBAGE), "length"
        case "loop":
            cycle = content[:5] or pieces("and then ")
            count = min(max_tokens, MAX_GARBAGE)
            content, finish = (cycle * (count // len(cycle) + 1))[:count], "length"
        case "wrong_answer":  # fluent, well-formed and wrong: another register's number, a digit off
            wrong = solve(prompt, distractor=True)
            content = pieces(wrong if wrong not in (None, text) else _other_digits(text))
        case "swapped":  # the answer to another request
            content = pieces(other) if other and other != text else pieces(_other_digits(text))
        case "cut_json":  # half of it, and `stop`
            content = content[: max(1, len(content) // 2)]
        case "reasoning_only":
            return Reply(reply.reasoning + content, [], "stop")
        case "jumbled":
            content = sorted(content, key=lambda token: zlib.crc32(token.encode()))
        case "empty":  # tokens are billed, none is shown
            content = [""] * len(content)
        case _:
            raise ValueError(f"no corruption {how!r}")
    return Reply(reply.reasoning, content[: max_tokens - len(reply.reasoning)] or [""], finish, reply.tool)


def _other_digits(text: str) -> str:
    """Each digit one further, and the first word doubled where there is none: never the same text."""
    changed = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), text)
    return changed if changed != text else f"Otherwise {text}"
