"""An answer of exactly max_tokens, where the server honours ignore_eos; its text is the business of `degenerate`."""

from __future__ import annotations

from loadgen.types import Grade, Outcome, Request
from workloads.graders import missed, right


def grade(request: Request, outcome: Outcome) -> Grade:
    """Usage alone counts: chunks are not tokens. An early end is wrong only where `exact` was asked for."""
    tokens, asked, reason = outcome.output_tokens, request.max_tokens, outcome.finish_reason
    if tokens is None or outcome.output_tokens_source == "estimated":
        return right("length", "length not checked: the server reports no usage")
    if tokens == asked and reason == "length":
        return right("length")
    why = f"{tokens} of {asked} tokens, finish_reason {reason}"
    if tokens > asked:
        return missed("length", "wrong", f"too long: {why}")
    if tokens == asked:
        # the model's own end fell on the last token, or the server words it so
        return right("length", why)
    if reason == "length":
        return missed("length", "wrong", f"cut before max_tokens: {why}", tokens / asked)
    if request.expect.get("exact"):
        return missed("length", "wrong", f"ended early: {why}", tokens / asked)
    return right("length", f"ended early, ignore_eos is not honoured: {why}")
