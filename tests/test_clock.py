"""The offset from the kernel's clock to ours: right through slewing, preemption, clock steps and suspends."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from loadgen.clock import STEADY_NS, WallOffset, now_ns, wall_ns


@dataclass
class Machine:
    """Two clocks of one machine. Slewing bends both, setting and sleeping move the wall clock alone."""

    mono_ns: int = 5_000_000_000
    wall_ns: int = 1_796_000_000_000_000_000

    @property
    def ahead_ns(self) -> int:
        return self.wall_ns - self.mono_ns

    def run(self, ns: int, slew_ppm: int = 0) -> None:
        ns += ns * slew_ppm // 1_000_000
        self.mono_ns += ns
        self.wall_ns += ns

    def bracket(self, first_ns: int = 60, second_ns: int = 60) -> tuple[int, int, int]:
        """Three readings, with so long between them."""
        before = self.mono_ns
        self.run(first_ns)
        real = self.wall_ns
        self.run(second_ns)
        return before, real, self.mono_ns


def settled(machine: Machine) -> WallOffset:
    """As of this machine; it begins with the clocks of the real one, which is a step away."""
    offset = WallOffset()
    offset.take(*machine.bracket())
    offset.steps = 0
    return offset


def test_offset_is_that_of_this_machine() -> None:
    offset = WallOffset()
    assert all(offset.look() for _ in range(100))
    assert abs(wall_ns() - now_ns() - offset.ns) < 50_000_000
    assert offset.steps == 0


@given(st.lists(st.tuples(st.integers(30, 20_000_000), st.integers(30, 20_000_000)), min_size=1, max_size=40))
def test_brackets_only_narrow_whoever_took_the_core_between_two_readings(waits: list[tuple[int, int]]) -> None:
    machine, widths = Machine(), []
    offset = settled(machine)
    for first, second in waits:
        assert offset.take(*machine.bracket(first, second))
        widths.append(first + second)
        assert abs(offset.ns - machine.ahead_ns) <= min(widths) // 2 + 1
        machine.run(20_000_000)
    assert offset.steps == 0


@given(st.lists(st.integers(-100_000, 100_000), min_size=1, max_size=20))
def test_slewing_is_no_step_since_it_bends_both_clocks(ppm: list[int]) -> None:
    machine = Machine()
    offset = settled(machine)
    for each in ppm:
        machine.run(1_000_000_000, each)
        assert offset.take(*machine.bracket())
    assert abs(offset.ns - machine.ahead_ns) <= 60


@given(st.integers(STEADY_NS + 200, 10**18), st.sampled_from([1, -1]))
def test_step_of_the_wall_clock_is_seen_at_the_next_look_and_once(size_ns: int, sign: int) -> None:
    machine = Machine()
    offset = settled(machine)
    machine.run(20_000_000)
    machine.wall_ns += sign * size_ns
    assert not offset.take(*machine.bracket())
    assert abs(offset.ns - machine.ahead_ns) <= 60
    assert offset.take(*machine.bracket())
    assert offset.steps == 1


def test_sleep_of_the_machine_is_a_step_because_the_monotonic_clock_stood_still() -> None:
    machine = Machine()
    offset = settled(machine)
    machine.wall_ns += 3_600_000_000_000
    assert not offset.take(*machine.bracket())
    assert abs(offset.ns - machine.ahead_ns) <= 60


def test_step_between_the_two_readings_of_a_bracket_is_seen() -> None:
    machine = Machine()
    offset = settled(machine)
    before = machine.mono_ns
    machine.wall_ns += 2_000_000
    assert not offset.take(before, machine.wall_ns, machine.mono_ns + 60)


def test_clock_that_creeps_in_steps_too_small_to_tell_is_followed() -> None:
    machine = Machine()
    offset = settled(machine)
    for _ in range(100):
        machine.wall_ns += STEADY_NS // 2
        assert offset.take(*machine.bracket())
    assert abs(offset.ns - machine.ahead_ns) <= STEADY_NS
