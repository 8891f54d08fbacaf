"""How the simulated server counts: a plain word is one token, a mark behind it another, all else one per 4 characters.

So prompts made of words are exactly additive (one word more is one token more), `/tokenize` and `usage` agree, and the
pieces of an answer joined are the answer. No real vocabulary is imitated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

TEMPLATE_TOKENS = 7  # what the chat template puts around a conversation
MESSAGE_TOKENS = 3  # and around each message
WORD_LETTERS = 24  # longer runs of letters are no words (and a language without spaces has no words at all)
CHARACTERS = 4
MARKS = ".,;:?!"  # behind a word, a token of their own, as in real vocabularies

_SPACED = re.compile(r"\s*\S+")


def _parts(word: str) -> list[str]:
    """The tokens of one run of non-space: a plain word, a word and the mark behind it, or four characters each."""
    stem = word.rstrip(MARKS)
    if stem.isalpha() and len(stem) <= WORD_LETTERS and len(word) - len(stem) <= 1:
        return [stem, *word[len(stem) :]]
    return [word[i : i + CHARACTERS] for i in range(0, len(word), CHARACTERS)]


def tokens(text: str) -> list[str]:
    """The tokens of a text without the white space between them."""
    found: list[str] = []
    for word in text.split():
        if word.isalpha() and len(word) <= WORD_LETTERS:  # nearly all of a long prompt: no list is made for it
            found.append(word)
        else:
            found.extend(_parts(word))
    return found


def pieces(text: str) -> list[str]:
    """The tokens of a text with the white space before them: joined they are the text, and as many as `tokens`."""
    found: list[str] = []
    for spaced in _SPACED.findall(text):
        word = spaced.lstrip()
        parts = _parts(word)
        parts[0] = spaced[: len(spaced) - len(word)] + parts[0]
        found.extend(parts)
    tail = text[len(text.rstrip()) :]
    if found and tail:
        found[-1] += tail
    return found


def conversation(messages: Iterable[tuple[str, str]]) -> list[str]:
    """The tokens of a chat prompt from (role, text): the template's own tokens stand where a template puts them."""
    found = ["<|template|>"] * TEMPLATE_TOKENS
    for role, text in messages:
        found.extend(("<|start|>", role, "<|sep|>"))
        found.extend(tokens(text))
    return found


def block_hashes(prompt: Sequence[str], block_tokens: int) -> tuple[int, ...]:
    """One number per full block, each over everything up to its end: equal numbers mean an equal prefix.

    Python's own hash is salted per process, which is right here: a prefix cache dies with its process.
    """
    chain = 0
    found: list[int] = []
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        chain = hash((chain, tuple(prompt[end - block_tokens : end])))
        found.append(chain)
    return tuple(found)
