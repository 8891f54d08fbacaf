"""Is this text at all? Loops, blanks, template leaks, foreign scripts and silence, under HTTP 200, on every answer.

Bounds are measured: of 11,000 windows of good English, Chinese and code none of 1,500 characters compressed below 0.038
of its bytes, and `!!!`, `13, 17,` or a short phrase in a loop lie between 0.013 and 0.026. Longer loops do not (a
sentence of 86 characters 0.063, a paragraph 0.15), but they repeat to the letter, which good text never did for 1,500
characters. Shorter runs and cycles inside good text are left alone: tables and rules have them.
"""

from __future__ import annotations

import re
import zlib

from loadgen.types import Grade, Outcome, Request
from workloads.graders import missed, quoted, right

WINDOW = 1500  # characters; the bounds hold for this width only
STRIDE = 750  # a loop of 2,250 characters covers at least one window whole
FAIL_RATIO = 0.03
WARN_RATIO = 0.06

CYCLE_TIMES = 4  # in a window to the letter, and in the last TAIL characters: long loops last to the end
TAIL = 6000
CYCLE_RATIO = 0.3  # above it a window cannot be four equal parts, so the search is spared
# Texts shorter than a window: a cycle that fills the last three quarters, at least this often and this long.
SHORT_TIMES = 8
SHORT_CHARACTERS = 64

# Special tokens that a server must swallow. `<|` alone is an operator in some languages.
_LEAK = re.compile(r"<\|[a-z_]|<｜|</?tool_call>|<\[?(?:start|end)_of_turn\]?>|\[/?INST\]")
_THINK = re.compile(r"</?think>")

# Letters of scripts other than Latin: a reply to a Latin prompt has next to none.
_FOREIGN = re.compile("[\u0370-\u1dbf\u3040-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0002ffff]")
_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")
DRIFT_FAIL, DRIFT_FAIL_LETTERS = 0.2, 16
DRIFT_WARN, DRIFT_WARN_LETTERS = 0.02, 4
PROMPT_CHARACTERS = 1000  # of the prompt's end say in which script it asks: never the whole of a 262,144-token prompt


def grade(request: Request, outcome: Outcome) -> Grade:
    """Content and reasoning apart: a loop in one must not be diluted by the other. Warnings are right, with a why."""
    warnings: list[str] = []
    for name, text in (("content", outcome.text), ("reasoning", outcome.reasoning_text)):
        if not text:
            continue
        fault = _blank(text) or _repetition(text, name, warnings) or _leak(text, name, outcome, warnings)
        if fault is None and name == "content":
            fault = _drift(request, text, warnings)
        if fault is not None:
            kind, why = fault
            return missed("degenerate", kind, f"{name}: {why}")
    silence = _silence(outcome, warnings)
    if silence is not None:
        return missed("degenerate", "empty", silence)
    return right("degenerate", "; ".join(warnings))


def _silence(outcome: Outcome, warnings: list[str]) -> str | None:
    if outcome.text or outcome.tool_calls:
        return None
    if not outcome.reasoning_text:
        tokens = outcome.output_tokens
        return f"silent empty answer: {tokens} tokens billed, no text" if tokens else "no text"
    if outcome.finish_reason == "length":
        warnings.append("reasoning used up max_tokens before an answer")
        return None
    return f"reasoning only, no answer, finish_reason {outcome.finish_reason}"


def _blank(text: str) -> tuple[str, str] | None:
    return None if text.strip() else ("empty", f"{len(text)} characters of white space")


def _repetition(text: str, name: str, warnings: list[str]) -> tuple[str, str] | None:
    if len(text) < WINDOW:
        period = _cycle(text.rstrip()[len(text) // 4 :], SHORT_TIMES)
        return None if period is None else ("degenerate", f"{quoted(text[-period:])} over and over")
    worst_at, worst = 0, 1.0
    last = len(text) - WINDOW
    for at in (*range(0, last, STRIDE), last):
        window = text[at : at + WINDOW]
        raw = window.encode("utf-8", "surrogatepass")
        ratio = len(zlib.compress(raw)) / len(raw)
        if ratio < worst:
            worst_at, worst = at, ratio
        if ratio < FAIL_RATIO or (ratio < CYCLE_RATIO and _cycle(window, CYCLE_TIMES)):
            return "degenerate", f"repeats itself from character {at}, zlib ratio {ratio:.3f}: {quoted(window)}"
    tail = text[-TAIL:]
    if len(tail) == TAIL and _cycle(tail, CYCLE_TIMES):
        return "degenerate", f"repeats itself from character {len(text) - TAIL}: {quoted(tail)}"
    if worst < WARN_RATIO:
        warnings.append(f"{name}: repetitive from character {worst_at}, zlib ratio {worst:.3f}")
    return None


def _cycle(text: str, times: int) -> int | None:
    """The period of a text that is nothing but one cycle, at least `times` times over, or None."""
    if len(text) < SHORT_CHARACTERS:
        return None
    longest = len(text) // times
    # where all but the longest period allowed comes again, the text is a cycle of the distance
    period = text.find(text[: len(text) - longest], 1)
    return period if 0 < period <= longest and text[period:] == text[:-period] else None


def _leak(text: str, name: str, outcome: Outcome, warnings: list[str]) -> tuple[str, str] | None:
    leak = _LEAK.search(text)
    if leak:
        around = text[max(0, leak.start() - 20) : leak.end() + 20]
        return "malformed", f"template text leaked: {quoted(around)}"
    # Bytes held back for a character that the token limit cut off are no fault.
    broken = (text[:-1] if outcome.finish_reason == "length" else text).count("\ufffd")
    if broken:
        return "malformed", f"{broken} broken characters (U+FFFD)"
    tags = _THINK.findall(text)
    if not tags:
        return None
    if name == "reasoning" or outcome.reasoning_text or tags.count("</think>") > 1:
        return "malformed", f"template text leaked: {', '.join(tags[:3])}"
    # One pair, or its end where the template begins it: a server without a reasoning parser, not a broken one.
    warnings.append("thinking stands in the content: the server runs without a reasoning parser")
    return None


def _drift(request: Request, text: str, warnings: list[str]) -> tuple[str, str] | None:
    foreign, latin = len(_FOREIGN.findall(text)), len(_LATIN.findall(text))
    if foreign < DRIFT_WARN_LETTERS and latin < DRIFT_WARN_LETTERS:
        return None
    asked = _prompt_end(request)
    asked_foreign = len(_FOREIGN.findall(asked))
    share = foreign / (foreign + latin)
    if not asked_foreign:
        if share > DRIFT_FAIL and foreign >= DRIFT_FAIL_LETTERS:
            return "degenerate", f"script drift: {share:.0%} of the letters are not Latin, the prompt's are"
        if share > DRIFT_WARN and foreign >= DRIFT_WARN_LETTERS:
            warnings.append(f"script drift: {share:.0%} of the letters are not Latin")
    elif asked_foreign > len(_LATIN.findall(asked)) and foreign == 0 and latin >= 200:
        warnings.append("script drift: a Latin answer to a prompt that is not")
    return None


def _prompt_end(request: Request) -> str:
    content = request.messages[-1].get("content") if request.messages else None
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content[-PROMPT_CHARACTERS:] if isinstance(content, str) else ""
