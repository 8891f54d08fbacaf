"""Long answers of a fixed length from natural tasks: what decoding, speculation and the growth of the KV cache cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from loadgen.types import Draw, Request, Session, Tokens, UserError
from workloads.turns import asked, opening, user

MIN_PROMPT_TOKENS = 128  # the longest task with its salt, and a template with a system text

# Natural tasks, because random words put the acceptance of speculative decoding near its floor.
TASKS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python module that reads a CSV file of {thing}, checks every row and prints a report. Add tests.",
        "Write a small command line program in Go that keeps a list of {thing} in a file. Explain each function.",
        "Write a SQL schema for {thing}, with example rows and ten queries that a user would need.",
        "Write a JavaScript class that sorts, filters and pages through {thing}. Show how to use it.",
    ),
    "prose": (
        "Tell a long story about a family that collects {thing}. Use many scenes and give every person a voice.",
        "Write a detailed essay on the history of {thing}, from the first ones to those of today.",
        "Write a long letter to a friend about a journey in search of {thing}.",
        "Write a handbook chapter for beginners on how to choose and store {thing}.",
    ),
    "chinese": (
        "请写一篇关于{thing}的长篇故事，要有许多场景和人物对话。",
        "请详细介绍{thing}的历史，从最早的时候一直写到今天。",
        "请给朋友写一封长信，讲述一次寻找{thing}的旅行。",
        "请为初学者写一章手册，说明如何挑选和保存{thing}。",
    ),
}
THINGS: dict[str, tuple[str, ...]] = {
    "code": ("books", "bus stops", "invoices", "sensors", "recipes", "seeds", "lamps", "maps", "tickets", "boats"),
    "prose": ("clocks", "maps", "teapots", "kites", "bells", "seeds", "coins", "lamps", "boats", "stamps"),
    "chinese": ("钟表", "地图", "茶壶", "风筝", "铜铃", "种子", "古币", "灯笼", "木船", "邮票"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """`max_tokens`: the length of every answer. `kinds`: code, prose, chinese, in turn. `exact`: an answer that ends
    early is wrong; otherwise the server merely does not know `ignore_eos`. `temperature`: at 0 every model falls into
    a loop once it is forced past its own end. `repeat`: how often each task is asked, first cold then warm."""

    prompt_tokens: Tokens = Tokens(128)
    max_tokens: int = 512
    kinds: tuple[str, ...] = ("prose", "code")
    exact: bool = False
    temperature: float = 0.8
    repeat: int = 1


def sessions(options: Options, draw: Draw) -> Iterator[Session]:
    unknown = [kind for kind in options.kinds if kind not in TASKS]
    if unknown or not options.kinds:
        raise UserError(f"generate: kinds has {unknown[0] if unknown else 'nothing'}; choose from {', '.join(TASKS)}")
    return (asked(partial(_task, options, draw, item), options.repeat) for item in count())


def _task(options: Options, draw: Draw, item: int) -> Request:
    random = draw.random(item, "task")
    kind = options.kinds[item % len(options.kinds)]
    tasks, things = TASKS[kind], THINGS[kind]
    task = tasks[int(random.random() * len(tasks))].format(thing=things[int(random.random() * len(things))])
    return Request(
        id=f"{draw.cls}-{item:06d}",
        cls=draw.cls,
        messages=user(opening(draw, item) + task),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        ignore_eos=True,
        grader="length",
        expect={"exact": options.exact},
        # the same sampling every night, on servers that honour it
        extra_body={"seed": int(random.random() * 2**31)} if options.temperature else {},
        tags={"kind": kind},
    )
