"""Latency histograms with HdrHistogram's buckets and wire format, and its interval logs, which Java's tools read.

The layout is fixed for the whole project, so that any two histograms can be added: integer microseconds, 1 µs to 24 h,
three significant digits (buckets at most 0.1 % wide). The codec (V2: zigzag LEB128, zlib, base64) is our own and
gives the bytes that the `hdrhistogram` package gives; that package has no wheels for aarch64, and its own read-outs
would stall an event loop for tens of milliseconds.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadgen.journal import Damage, Reading, raw_lines

Ints: TypeAlias = NDArray[np.int64]

LOWEST_US = 1
HIGHEST_US = 86_400_000_000
DIGITS = 3
# 2,048 sub-buckets of 1 µs, then 1,024 for each doubling: three digits need 2 · 10³, rounded up to a power of two.
_HALF_BITS = 10
_HALF = 1 << _HALF_BITS
_TOP_SHIFT = HIGHEST_US.bit_length() - (_HALF_BITS + 1)
_TOP_INDEX = (_TOP_SHIFT << _HALF_BITS) + (HIGHEST_US >> _TOP_SHIFT)

_ENCODED = 0x1C849303 | 0x10
_COMPRESSED = 0x1C849304 | 0x10
_OUTER = struct.Struct(">II")  # cookie, length
_INNER = struct.Struct(">IIIIQQd")  # cookie, length, index offset, digits, lowest, highest, conversion ratio
# Values that wait to be counted: a batch costs some 50 µs plus 0.1 µs each.
BATCH = 4096
# Larger than any payload of this layout (28,672 counters of at most 9 bytes); a damaged blob must not unpack to more.
_MAX_PAYLOAD_BYTES = 1 << 19


def _index_of(values: Ints) -> Ints:
    """The bucket of each value (0 … HIGHEST_US). frexp gives the bit length exactly up to 2⁵³."""
    shift = np.frexp((values | (2 * _HALF - 1)).astype(np.float64))[1].astype(np.int64) - (_HALF_BITS + 1)
    index: Ints = (shift << _HALF_BITS) + (values >> shift)
    return index


def _lowest_of(index: Ints) -> Ints:
    """The smallest value of each bucket."""
    shift = np.maximum((index >> _HALF_BITS) - 1, 0)
    return np.where(index < 2 * _HALF, index, ((index & (_HALF - 1)) + _HALF) << shift)


def _width_of(index: Ints) -> Ints:
    """How many values share each bucket."""
    width: Ints = np.left_shift(np.int64(1), np.maximum((index >> _HALF_BITS) - 1, 0))
    return width


class Hist:
    """Counts of values in µs. Only buckets that hold something are kept, 12 bytes each, and values wait in batches to
    be counted: at most 12 · min(n, 28,000) + 8 · min(n, 4,096) bytes, so thousands of small ones fit where a dense one
    takes 229 KB.

    Values below 0 or above 24 h go to the first or last bucket and are counted in `overflow`; 0 is a value as in
    HdrHistogram itself. `min`, `max` and `sum` are exact while recording and adding, also out of range; after
    `decode` they are what the buckets tell (within 0.1 %). Equality means equal buckets.
    """

    __slots__ = ("_count", "_index", "_max", "_min", "_overflow", "_sum", "_waiting")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Iterable[int] | Ints = ()) -> None:
        self._index = np.empty(0, np.int32)
        self._count = np.empty(0, np.int64)
        self._waiting = array("q")
        self._overflow = 0
        self._sum = 0
        self._min: int | None = None
        self._max: int | None = None
        self.record(values)

    def record(self, values: Iterable[int] | Ints) -> None:
        """Adds integer microseconds: 0.1 µs a value and a batch, or an array, at a time."""
        if isinstance(values, np.ndarray):
            self._waiting.frombytes(np.ascontiguousarray(values, np.int64).tobytes())
        else:
            self._waiting.extend(values)
        if len(self._waiting) >= BATCH:
            self._settle()

    def add(self, other: Hist) -> None:
        """Adds all of another one: the histogram of the concatenated values."""
        if other.min is None or other.max is None:
            return
        self._settle()
        self._merge(other._index, other._count)
        self._widen(other.min, other.max)
        self._sum += other._sum
        self._overflow += other._overflow

    @property
    def n(self) -> int:
        self._settle()
        return int(self._count.sum())

    @property
    def min(self) -> int | None:
        self._settle()
        return self._min

    @property
    def max(self) -> int | None:
        self._settle()
        return self._max

    @property
    def sum(self) -> int:
        self._settle()
        return self._sum

    @property
    def overflow(self) -> int:
        self._settle()
        return self._overflow

    @property
    def mean(self) -> float | None:
        n = self.n
        return self._sum / n if n else None

    def quantile(self, p: float) -> int | None:
        """The value at rank ceil(p·n), as Java's HdrHistogram reads it: the highest value of that rank's bucket, but
        never above the largest recorded. None without values. Ranks among those above 24 h give the exact maximum."""
        n, largest = self.n, self.max
        if largest is None:
            return None
        # The slack undoes the rounding of products such as 0.07 · 100.
        rank = min(max(math.ceil(p * n * (1 - 1e-12)), 1), n)
        at = int(np.searchsorted(np.cumsum(self._count), rank))
        index = self._index[at : at + 1].astype(np.int64)
        if index[0] == _TOP_INDEX:
            return largest
        return min(int(_lowest_of(index)[0] + _width_of(index)[0] - 1), largest)

    def buckets(self) -> tuple[Ints, Ints]:
        """The lowest value of each bucket in use, and its count."""
        self._settle()
        return _lowest_of(self._index.astype(np.int64)), self._count.copy()

    def encode(self) -> bytes:
        """Base64 of the compressed V2 form."""
        self._settle()
        counts = _leb128(_with_zero_runs(self._index.astype(np.int64), self._count))
        inner = _INNER.pack(_ENCODED, len(counts), 0, DIGITS, LOWEST_US, HIGHEST_US, 1.0)
        packed = zlib.compress(inner + counts)
        return base64.b64encode(_OUTER.pack(_COMPRESSED, len(packed)) + packed)

    @classmethod
    def decode(cls, encoded: bytes) -> Hist:
        """The reverse; ValueError for anything that is not a histogram of this layout."""
        raw = base64.b64decode(encoded, validate=True)
        if len(raw) < _OUTER.size:
            raise ValueError("histogram is cut short")
        cookie, length = _OUTER.unpack_from(raw)
        if cookie & ~0xF0 != _COMPRESSED & ~0xF0 or length != len(raw) - _OUTER.size:
            raise ValueError("not a compressed V2 histogram, or cut short")
        unpack = zlib.decompressobj()
        try:
            payload = unpack.decompress(raw[_OUTER.size :], _MAX_PAYLOAD_BYTES)
        except zlib.error as error:
            raise ValueError(f"histogram does not unpack: {error}") from None
        if not unpack.eof or len(payload) < _INNER.size:
            raise ValueError("histogram is cut short or too large")
        cookie, length, offset, digits, lowest, highest, _ = _INNER.unpack_from(payload)
        if cookie & ~0xF0 != _ENCODED & ~0xF0 or length != len(payload) - _INNER.size:
            raise ValueError("histogram's inner header is damaged")
        if (offset, digits, lowest) != (0, DIGITS, LOWEST_US) or highest > HIGHEST_US:
            raise ValueError(f"histogram of another layout: {digits} digits from {lowest} to {highest}")
        index, count = _without_zero_runs(_words(payload[_INNER.size :]))
        hist = cls()
        if index.size:
            lows, widths = _lowest_of(index), _width_of(index)
            hist._index, hist._count = index.astype(np.int32), count
            hist._min, hist._max = int(lows[0]), min(int(lows[-1] + widths[-1] - 1), HIGHEST_US)
            hist._sum = round(float(np.dot(lows + widths // 2, count.astype(np.float64))))
        return hist

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hist):
            return NotImplemented
        self._settle()
        other._settle()
        return np.array_equal(self._index, other._index) and np.array_equal(self._count, other._count)

    def __repr__(self) -> str:
        return f"<Hist n={self.n} p50={self.quantile(0.5)} max={self.max} µs>"

    def _settle(self) -> None:
        """Counts the values that wait."""
        if not self._waiting:
            return
        values = np.array(self._waiting, np.int64)
        self._waiting = array("q")
        low, high = int(values.min()), int(values.max())
        self._widen(low, high)
        self._sum += int(values.sum())
        if low < 0 or high > HIGHEST_US:
            self._overflow += int(np.count_nonzero((values < 0) | (values > HIGHEST_US)))
            values = values.clip(0, HIGHEST_US)
        index, count = np.unique(_index_of(values), return_counts=True)
        self._merge(index, count.astype(np.int64))

    def _merge(self, index: NDArray[np.integer], count: Ints) -> None:
        both = np.concatenate((self._index, index.astype(np.int32)))
        self._index, where = np.unique(both, return_inverse=True)
        total = np.zeros(self._index.size, np.int64)
        np.add.at(total, where, np.concatenate((self._count, count)))
        self._count = total

    def _widen(self, low: int, high: int) -> None:
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)


def whole_us(durations_ns: array[int]) -> Ints:
    """Nanoseconds to the nearest whole microsecond."""
    us: Ints = (np.frombuffer(durations_ns, np.int64) + 500) // 1000
    return us


def merged(hists: Iterable[Hist]) -> Hist:
    """One histogram of all values of all."""
    total = Hist()
    for hist in hists:
        total.add(hist)
    return total


def _with_zero_runs(index: Ints, count: Ints) -> Ints:
    """Counters from bucket 0 to the last one in use, each run of k empty buckets as the one word -k."""
    gaps = np.diff(index, prepend=-1) - 1
    words = np.column_stack((-gaps, count)).reshape(-1)
    used: Ints = words[words != 0]
    return used


def _without_zero_runs(words: Ints) -> tuple[Ints, Ints]:
    """The reverse. A lone empty bucket may also stand as 0, as Java writes it."""
    if words.size and words.min() < -(_TOP_INDEX + 1):
        raise ValueError("histogram has buckets beyond its layout")
    ends = np.cumsum(np.where(words < 0, -words, 1))
    if ends.size and ends[-1] > _TOP_INDEX + 1:
        raise ValueError("histogram has buckets beyond its layout")
    used = words > 0
    if words[used].sum(dtype=np.float64) >= 1 << 62:
        raise ValueError("histogram has a counter that is too large")
    return ends[used] - 1, words[used]


_LEB_BYTES = 9  # the ninth byte holds eight bits, so 64 fit


def _leb128(words: Ints) -> bytes:
    zigzag = ((words << 1) ^ (words >> 63)).view(np.uint64)
    size = np.ones(words.size, np.int64)
    largest = int(zigzag.max(initial=0))
    for k in range(1, _LEB_BYTES):
        if largest >= 1 << 7 * k:
            size += zigzag >= np.uint64(1 << 7 * k)
    starts = np.cumsum(size) - size
    out = np.zeros(int(size.sum()), np.uint8)
    for k in range(int(size.max(initial=0))):
        has = size > k
        more = size[has] > k + 1
        bits = zigzag[has] >> np.uint64(7 * k)
        last = np.uint64(0xFF if k == _LEB_BYTES - 1 else 0x7F)
        out[starts[has] + k] = (bits & last).astype(np.uint8) | (more.astype(np.uint8) << 7)
    return out.tobytes()


def _words(data: bytes) -> Ints:
    """LEB128 of at most 63 bits back to integers; ValueError where it ends in the middle of one."""
    raw = np.frombuffer(data, np.uint8)
    if not raw.size:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(raw < 0x80)
    if not ends.size or ends[-1] != raw.size - 1:
        raise ValueError("histogram's counters are cut short")
    starts = np.concatenate(([0], ends[:-1] + 1))
    place = np.arange(raw.size) - np.repeat(starts, ends - starts + 1)
    if place.max() >= _LEB_BYTES:
        raise ValueError("histogram has a counter that is too large")
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    zigzag = np.bitwise_or.reduceat(bits, starts)
    return (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Interval logs


def tag_part(name: str) -> str:
    """A name as it may stand in a tag: no comma, colon or white space."""
    return "".join("_" if c in ",:" or c.isspace() else c for c in name)


@dataclass(frozen=True, slots=True)
class Interval:
    """One line of an interval log. Times are nanoseconds of the writer's monotonic clock."""

    tag: str
    start_ns: int
    end_ns: int
    hist: Hist


def log_header(reading: Reading) -> list[str]:
    """The first lines of a log: `reading` is `clock.reading()`; all later times are relative to that moment."""
    mono, wall = int(reading["mono_ns"] or 0), int(reading["wall_ns"] or 0)
    return [
        "#[Histogram log format version 1.3]",
        f"#[loadgen.windows/1 mono_ns={mono} wall_ns={wall} unit=us]",
        f"#[StartTime: {wall / 1e9:.3f} (seconds since epoch)]",
        f"#[BaseTime: {wall / 1e9:.3f} (seconds since epoch)]",
        '"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"',
    ]


def log_line(tag: str, start_ns: int, end_ns: int, base_ns: int, hist: Hist) -> bytes:
    """One interval; its maximum is exact, in ms as Java's tools write it. `tag` may hold no comma and no space."""
    start, length = (start_ns - base_ns) / 1e9, (end_ns - start_ns) / 1e9
    return f"Tag={tag},{start:.6f},{length:.6f},{(hist.max or 0) / 1e3:.3f},".encode() + hist.encode()


_LINE = re.compile(rb"(?:Tag=([^,]*),)?(-?[\d.]+),([\d.]+),([\d.]+),([A-Za-z0-9+/=]+)\s*")
_BASE = re.compile(rb"#\[loadgen\.windows/1 mono_ns=(\d+)")


def read_log(path: Path, damage: Damage) -> Iterator[Interval]:
    """The intervals of a log, ours or another's of this layout; what cannot be read is counted and left out. Without
    our own header (a foreign log) times count from the log's base time."""
    base_ns = 0
    for line in raw_lines(path, damage):
        if line.startswith((b"#", b'"')):
            if ours := _BASE.match(line):
                base_ns = int(ours[1])
            continue
        parts = _LINE.fullmatch(line)
        try:
            if parts is None:
                raise ValueError("not an interval")
            start_ns = base_ns + round(float(parts[2]) * 1e9)
            end_ns = start_ns + round(float(parts[3]) * 1e9)
            peak_us = round(float(parts[4]) * 1e3)
            hist = Hist.decode(parts[5])
        except ValueError:
            damage.torn_lines += 1
            continue
        # Our lines tell the maximum exactly; in a foreign log the number may have another unit.
        if hist.max is not None and (peak_us > HIGHEST_US or abs(peak_us - hist.max) * _HALF <= hist.max):
            hist._max = peak_us
        yield Interval((parts[1] or b"").decode(errors="replace"), start_ns, end_ns, hist)
