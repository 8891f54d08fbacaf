"""The Prometheus text format, line by line, for every monitor that reads it: one bad line costs one line.

prometheus_client's parser reads the same pages but gives up the whole page at one bad line; a test holds this one
against it on good pages. No monitor: it watches nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

Series = dict[frozenset[tuple[str, str]], float]

# Label texts of a page are the same at every scrape: vLLM's page has 1,000 of them.
MAX_REMEMBERED_LABELS = 8192


@dataclass(slots=True)
class Page:
    """A parsed page: per metric name the values by label set, and how many lines could not be read."""

    series: dict[str, Series] = field(default_factory=dict)
    bad_lines: int = 0
    first_bad: str = ""


# A blank inside a label value, an escaped quote, a timestamp behind the value: all occur.
_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    r"(?:\{(?P<labels>(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?[ \t]*"
    r"(?P<value>[-+]?(?:[0-9.]+(?:[eE][-+]?[0-9]+)?|[iI]nf(?:inity)?|[nN]a[nN]))(?:[ \t]+-?[0-9.]+)?[ \t\r]*"
)
_LABEL = re.compile(r"\s*(?P<key>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"(?P<value>(?:[^\"\\]|\\.)*)\"\s*(?:,|$)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


def parse(text: str, without: tuple[str, ...] = ()) -> Page:
    """A whole page, but for lines that hold one of the words `without`. Lines end at LF only (a model's name may hold
    other line separators of Unicode)."""
    page = Page()
    for line in text.split("\n"):
        if not line or line.startswith("#") or line.isspace() or any(word in line for word in without):
            continue
        found = _LINE.fullmatch(line.lstrip(" \t"))
        labels = None if found is None else label_set(found["labels"] or "")
        try:
            if found is None or labels is None:
                raise ValueError
            value = float(found["value"])
        except ValueError:
            page.bad_lines += 1
            page.first_bad = page.first_bad or line[:200]
            continue
        page.series.setdefault(found["name"], {})[labels] = value
    return page


@lru_cache(MAX_REMEMBERED_LABELS)
def label_set(text: str) -> frozenset[tuple[str, str]] | None:
    """`a="b",c="d"` as pairs, or None where it is something else."""
    pairs: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            return None if text[at:].strip() else frozenset(pairs)
        value = found["value"]
        if "\\" in value:
            value = _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[0]), value)
        pairs.append((found["key"], value))
        at = found.end()
    return frozenset(pairs)
