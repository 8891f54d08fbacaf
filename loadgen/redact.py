"""What of a command line or an environment may be passed on: no key, no path, no address, no name of a machine.

A run folder is made to be shown to strangers. What explains a result is kept (flags, sizes, types, model names), the
rest becomes `…`. When in doubt it is hidden: a fingerprint that lacks a word is still a fingerprint.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterable, Sequence

HIDDEN = "…"
MAX_WORDS = 200  # vLLM's longest known command lines have 80
MAX_WORD_CHARS = 300  # a JSON configuration; what is longer is a document
MAX_SETTINGS = 60
MAX_DEPTH = 3  # `bash -c "…"` within a `bash -c "…"`

# Parts of a flag's or a variable's name whose value is a secret, or says where a machine is.
SECRET = frozenset({
    "key", "keys", "keyfile", "apikey", "token", "secret", "secrets", "password", "passwd", "passphrase", "pass",
    "auth", "authorization", "bearer", "cookie", "credential", "credentials", "cred", "creds", "hft",
})  # fmt: skip
# …and what such a part may end with where a name runs words together (accesskey, HFTOKEN, PGPASSWORD).
SECRET_ENDS = ("key", "keys", "token", "secret", "secrets", "password", "passwd", "credential", "credentials")
WHERE = frozenset({
    "host", "hosts", "hostname", "addr", "address", "ip", "ips", "master", "endpoint", "url", "uri", "node", "nodes",
    "server", "dsn", "proxy", "rpc", "peer", "peers",
})  # fmt: skip
# …but not these: what a number counts is no secret.
PLURAL = frozenset({"tokens"})
REVISION = frozenset({"revision"})
# Everybody's addresses say nothing.
ANYWHERE = frozenset({"0.0.0.0", "127.0.0.1", "::", "::1", "[::]", "[::1]", "localhost", "*"})
# Variables that explain a speed or a memory figure. Of all others not even the name is kept.
SETTINGS = re.compile(
    r"^(?:VLLM|SGLANG|SGL|LLAMA|GGML|NCCL|CUDA|NVIDIA|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|MKL|OPENBLAS|FLASHINFER|"
    r"HSA|ROCR|ROCM|HIP|MALLOC|TOKENIZERS|HF_HUB_OFFLINE|LD_PRELOAD|PYTHONHASHSEED|RAY)(?:_|$)"
)

_NUMBER = re.compile(r"[+-]?[\d.,]+[kKmMgGtT]?i?[bB]?")
_LONG_HEX = re.compile(r"\b[0-9a-fA-F]{32,}\b")
_URL = re.compile(r"\b[a-zA-Z][\w+.-]*://\S+")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?![\w:])")
_MAC = re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w…/.])(?:~|\.{1,2})?/(?:[^\s/\"',:;]+/)*([^\s/\"',:;]*)")
_DEEP = re.compile(r"(?<![\w…/])(?:[\w.+-]+/){2,}([\w.+-]+)")
_HOME = re.compile(r"(?<!\w)(?:/home|/Users|/root)(?:/[^\s/\"',:;]+)?(?=$|[\s\"',:;])")
_TOKENS = (
    re.compile(r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{4,}"),
    re.compile(
        # 16 after hf_: a token has 34, and `--hf_overrides` is a flag
        r"\b(?:sk|pk|rk|nvapi|gsk|xox[abps])-[\w-]{8,}|\bhf_\w{16,}|\b(?:gh[opsur]|glpat|github_pat)[_-]\w{8,}|"
        r"\bAKIA\w{12,}"
    ),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"),
    re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"),
    re.compile(r"(?<![\w./+-])[\w.+-]+@[\w-]+"),  # a user of a machine without a domain; org/model@revision is none
)
# name = value, name: value, "name": "value" anywhere in a word
_PAIR = re.compile(r"""([A-Za-z][\w.-]*)(["']?\s*[=:]\s*["']?)([^\s"',;})\]]+)""")
_RANDOM = re.compile(r"\b(?=\w*[a-z])(?=\w*[A-Z])(?=\w*\d)[A-Za-z0-9]{24,}\b")


def words(argv: Sequence[str], depth: int = 0) -> list[str]:
    """A command line that may be passed on. After a flag that names a secret every word is hidden up to the next flag
    (vLLM takes several keys after one `--api-key`)."""
    said: list[str] = []
    flag_secret = flag_where = flag_revision = plural = False
    fresh = False  # the word before is a flag, and this one may be its value even if it begins with a dash
    for n, word in enumerate(argv[:MAX_WORDS]):
        if n == 0:
            said.append(text(word, depth) if " " in word else _last_of(word))
            continue
        is_flag = word.startswith("-") and not _NUMBER.fullmatch(word)
        if flag_secret and (not is_flag or (fresh and not word.startswith("--"))):
            said.append(HIDDEN if not (plural and _NUMBER.fullmatch(word)) else word)
            fresh = False
        elif is_flag:
            flag, equals, value = word.partition("=")
            flag_secret, flag_where = _says(flag, SECRET), _says(flag, WHERE)
            flag_revision, plural = _says(flag, REVISION), _plural(flag)
            said.append(f"{flag}={_value(flag, value, depth)}" if equals else text(word, depth))
            fresh = not equals
            if equals:
                flag_secret = flag_where = flag_revision = False
        else:
            said.append(
                _place(word) if flag_where
                else word if flag_revision and _LONG_HEX.fullmatch(word)
                else text(word, depth)
            )  # fmt: skip
            flag_where = flag_revision = fresh = False
    if len(argv) > MAX_WORDS:
        said.append(f"{HIDDEN} and {len(argv) - MAX_WORDS} more")
    return said


def _value(flag: str, value: str, depth: int) -> str:
    """The value of `flag=value`."""
    if _says(flag, SECRET) and not (_plural(flag) and _NUMBER.fullmatch(value)):
        return HIDDEN
    if _says(flag, WHERE):
        return _place(value)
    return value if _says(flag, REVISION) and _LONG_HEX.fullmatch(value) else text(value, depth)


def text(word: str, depth: int = 0) -> str:
    """Free text that may be passed on. A script within a word is taken as a command line of its own."""
    for pattern in _TOKENS:
        word = pattern.sub(HIDDEN, word)
    word = _PAIR.sub(_pair, word)
    if " " in word.strip() and depth < MAX_DEPTH and not word.startswith(("{", "[")):
        try:
            inner = shlex.split(word)
        except ValueError:
            inner = []
        if len(inner) > 1:
            return " ".join(words(["-", *inner], depth + 1)[1:])[:MAX_WORD_CHARS]
    for pattern in (_URL, _MAC, _RANDOM, _LONG_HEX):
        word = pattern.sub(HIDDEN, word)
    word = _IPV4.sub(lambda m: m[0] if m[0] in ANYWHERE else HIDDEN, word)
    word = _IPV6.sub(_ipv6, word)
    word = _HOME.sub(HIDDEN, word)
    word = _PATH.sub(lambda m: f"{HIDDEN}/{m[1]}", word)
    word = _DEEP.sub(lambda m: f"{HIDDEN}/{m[1]}", word)
    return "".join(c if c.isprintable() else " " for c in word)[:MAX_WORD_CHARS]


def settings(environ: Iterable[str]) -> dict[str, str]:
    """Of `NAME=value` entries those that explain a result; a secret's or an address's value is hidden."""
    found: dict[str, str] = {}
    for entry in sorted(environ):
        name, equals, value = entry.partition("=")
        if not equals or not SETTINGS.match(name):
            continue
        hide = _says(name, SECRET) and not (_plural(name) and _NUMBER.fullmatch(value))
        found[text(name)] = HIDDEN if hide else _place(value) if _says(name, WHERE) else text(value)
        if len(found) == MAX_SETTINGS:
            break
    return found


def url(address: str) -> str:
    """An address for the user who gave it: without the password that may stand in it."""
    return re.sub(r"(//)[^/@\s]*@", rf"\1{HIDDEN}@", address)


def _says(name: str, parts: frozenset[str]) -> bool:
    """Whether a name has one of these among its parts: --hf-token, HF_TOKEN, apiKey, x-api-key."""
    split = re.sub(r"([a-z])([A-Z])", r"\1-\2", name)
    found = {part for part in re.split(r"[^A-Za-z0-9]+", split.lower()) if part}
    if parts is not SECRET:
        return bool(found & parts)
    return bool(found & (SECRET | PLURAL)) or any(part.endswith(SECRET_ENDS) for part in found)


def _plural(name: str) -> bool:
    return name.lower().rstrip("=").endswith("tokens")


def _pair(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    if _says(name, SECRET) and not (_plural(name) and _NUMBER.fullmatch(value)):
        return f"{name}{between}{HIDDEN}"
    return f"{name}{between}{_place(value)}" if _says(name, WHERE) else found[0]


def _ipv6(found: re.Match[str]) -> str:
    try:
        ipaddress.IPv6Address(found[0])
    except ValueError:
        return found[0]
    return found[0] if found[0] in ANYWHERE else HIDDEN


def _place(value: str) -> str:
    """Where something is: everywhere and nowhere may be said, and a port."""
    host, colon, port = value.rpartition(":")
    if value in ANYWHERE or (_NUMBER.fullmatch(value) and "." not in value):
        return value
    if colon and port.isdigit():
        return f"{host if host in ANYWHERE else HIDDEN}:{port}"
    return HIDDEN


def _last_of(path: str) -> str:
    """The name of a program without its folder."""
    return path.rstrip("/").rpartition("/")[2] or path
