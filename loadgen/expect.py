"""What a scenario can be expected to yield, before any server is asked: samples per class, rules out of reach.

Speeds are assumptions of the caller (`loadgen validate --prefill --decode`); a 128K prefill at 2,000 tokens/s takes
64 s, so a share of 2 in 100 may come to a single sample in 600 s. Better to read that here than in the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadgen import plugins, scenario
from loadgen.types import ClassSpec, Scenario


def service_s(spec: ClassSpec, name: str, *, prefill_per_s: float, decode_per_s: float) -> float:
    """How long one request of the class takes alone: the longest prompt read, the longest answer written."""
    module = plugins.load("workloads", spec.workload or name)
    options = plugins.options(module, spec.options)
    return float(options.prompt_tokens / prefill_per_s + options.max_tokens / decode_per_s)


def measured_s(scene: Scenario) -> float:
    """Length of the measuring phases that end by time."""
    return sum(phase.duration or 0.0 for phase in scene.phases if phase.kind == "measure")


def samples(scene: Scenario, *, prefill_per_s: float, decode_per_s: float) -> dict[str, float]:
    """Expected answers per class in the measuring phases: seats × time shared out by weight (closed loop)."""
    cost = {
        name: service_s(spec, name, prefill_per_s=prefill_per_s, decode_per_s=decode_per_s)
        for name, spec in scene.classes.items()
    }
    weights = scenario.mixed_weights(scene.classes)
    total = sum(weights.values())
    seats = scene.concurrency - sum(spec.seats for spec in scene.classes.values())
    mean_s = sum(weight / total * cost[name] for name, weight in weights.items()) if total else 0.0
    seconds = measured_s(scene)
    counted = sum(phase.count or 0 for phase in scene.phases if phase.kind == "measure")
    expected = {}
    for name, spec in scene.classes.items():
        if spec.seats:
            expected[name] = spec.seats * seconds / cost[name]
        else:
            expected[name] = weights[name] / total * (seats * seconds / mean_s + counted) if name in weights else 0.0
    return expected


def out_of_reach(scene: Scenario, expected: Mapping[str, float]) -> dict[str, list[str]]:
    """Rules that cannot reach their minimum, and why; each rule says what it needs (`needs(options)`)."""
    why: dict[str, list[str]] = {}
    for name in plugins.names("rules"):
        module = plugins.load("rules", name)
        if name in scene.skip_rules or not hasattr(module, "needs"):
            continue
        needs = module.needs(plugins.options(module, scene.rules.get(name, {})))
        if reasons := needs.unreachable(measured_s(scene), expected, scene.monitors):
            why[name] = reasons
    return why


def text(scene: Scenario, *, prefill_per_s: float, decode_per_s: float) -> str:
    """The end of `loadgen validate`."""
    expected = samples(scene, prefill_per_s=prefill_per_s, decode_per_s=decode_per_s)
    lines = [
        f"expected answers at prefill {prefill_per_s:g} and decode {decode_per_s:g} tokens/s (--prefill, --decode):"
    ]
    lines += [f"  {name:<16} about {n:,.0f}" for name, n in expected.items()]
    unreachable = out_of_reach(scene, expected)
    if not unreachable:
        return "\n".join([*lines, "every rule can reach its minimum"])
    lines.append("rules that cannot reach their minimum, and will say not_evaluated:")
    for name, reasons in unreachable.items():
        required = " (required: the run would be INCONCLUSIVE)" if name in scene.require else ""
        lines.append(f"  {name:<16} {'; '.join(reasons)}{required}")
    return "\n".join(lines)
