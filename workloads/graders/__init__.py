"""What counts as a right answer: one file per grader, pure and cheap, since every answer of a soak is graded."""

from __future__ import annotations

from loadgen.types import Grade, Outcome

WHY_CHARACTERS = 80  # of an answer, quoted in a reason: a reason is one line


def answer(outcome: Outcome) -> str:
    """The text to compare: what follows the thinking, where a server without a reasoning parser left it in."""
    return outcome.text.rpartition("</think>")[2].strip()


def quoted(text: str) -> str:
    """The head of an answer, on one line."""
    return repr(text[:WHY_CHARACTERS]) + ("…" if len(text) > WHY_CHARACTERS else "")


def right(grader: str, why: str = "") -> Grade:
    return Grade(ok=True, score=1.0, kind="ok", why=why, grader=grader)


def missed(grader: str, kind: str, why: str, score: float = 0.0) -> Grade:
    return Grade(ok=False, score=score, kind=kind, why=why, grader=grader)


def empty(grader: str, outcome: Outcome) -> Grade:
    """The miss of an answer without text. One whose thinking used up the tokens is wrong, not empty: the server is
    not to blame."""
    if outcome.finish_reason == "length" and (outcome.reasoning_text or outcome.text):
        return missed(grader, "wrong", "max_tokens was used up before an answer")
    return missed(grader, "empty", "no text")
