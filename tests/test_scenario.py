from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import expect, plugins, scenario, strict
from loadgen.types import Seconds, Tokens, UserError

SMALL = """\
name: small
classes:
  chat_short: {weight: 1}
phases:
  - {kind: measure, duration: 60s}
"""


def write(folder: Path, text: str, name: str = "s.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "line", "key", "say"),
    [
        (SMALL + "concurency: 4\n", 6, "concurency", 'did you mean "concurrency"?'),
        (SMALL + "target:\n  ulr: http://x\n", 7, "target.ulr", 'did you mean "url"?'),
        (SMALL + "concurrency: four\n", 6, "concurrency", "expected `int`"),
        (SMALL + "concurrency: 0\n", 6, "concurrency", "at least one seat"),
        (SMALL.replace("weight: 1", "weight: 0"), 2, "classes", "sum to nothing"),
        (SMALL.replace("weight: 1", "weight: heavy"), 3, "classes.chat_short.weight", "expected `float`"),
        (SMALL.replace("weight: 1", "wieght: 1"), 3, "classes.chat_short.wieght", 'did you mean "weight"?'),
        (SMALL.replace("weight: 1", "weight: 1, seats: 1"), 3, "classes.chat_short", "not both"),
        (SMALL.replace("weight: 1", "seats: 9"), 2, "concurrency", "only 4"),
        (SMALL.replace("chat_short", "chat_shirt"), 3, "chat_shirt", 'did you mean "chat_short"?'),
        (
            SMALL.replace("{weight: 1}", "{weight: 1, options: {max_token: 3}}"),
            3,
            "classes.chat_short.options.max_token",
            'did you mean "max_tokens"?',
        ),
        (SMALL.replace("60s", "sixty"), 5, "duration", "such as 90s"),
        (SMALL.replace("duration: 60s", "duration: -3"), 5, "phases.0.duration", "cannot be -3"),
        (SMALL.replace(", duration: 60s", ""), 5, "phases.0", "needs a duration or a count"),
        (SMALL.replace("kind: measure", "kind: mesure"), 5, "phases.0.kind", "mesure"),
        (SMALL + "  - {kind: measure, duration: 1s}\n", 6, "phases.1", "give one of them a name"),
        (SMALL + "  - {kind: functional, duration: 1s}\n", 6, "phases.1.duration", "no duration"),
        (SMALL + "monitors: {hots: {}}\n", 6, "monitors.hots", 'did you mean "host"?'),
        (SMALL + "rules: {drfit: {}}\n", 6, "rules.drfit", 'did you mean "drift"?'),
        (SMALL + "rules: {drift: {warn: 2}}\n", 6, "rules.drift.warn", 'unknown key "warn"'),
        (SMALL + "require: [eror]\n", 6, "require.0", 'did you mean "errors"?'),
        (SMALL + 'slo: ["tttf p95 < 2s"]\n', 6, "slo.0", "ttft"),
        (SMALL + 'slo: ["ttft[class=chat] p95 < 2s"]\n', 6, "slo.0", 'did you mean "chat_short"?'),
        (SMALL + "target: {api_key: secret}\n", 6, "target.api_key", "expected"),
        (SMALL + "target: {api_key: {}}\n", 6, "target.api_key", "{env: NAME}"),
        (SMALL + "name: again\n", 6, "name", "stands twice"),
        (SMALL + "target: {dialect: openai_chta}\n", 6, "target.dialect", 'did you mean "openai_chat"?'),
    ],
)
def test_a_mistake_is_one_line_with_file_line_key_and_a_way_out(
    tmp_path: Path, text: str, line: int, key: str, say: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        scenario.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}:{line}: ") or message.startswith(f"{path}: ")
    assert key in message
    assert say in message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "say"),
    [
        ("a: [1\n", "not valid YAML"),
        ("- a\n- b\n", "a scenario is a mapping"),
        ("", "a scenario is a mapping"),
        ("name: x\nphases: [{kind: measure, duration: 1s}]\n", "no classes"),
        ("name: x\nclasses: {chat_short: {weight: 1}}\n", "no phases"),
    ],
)
def test_a_file_that_is_no_scenario_says_so(tmp_path: Path, text: str, say: str) -> None:
    with pytest.raises(UserError, match=say):
        scenario.load(write(tmp_path, text))


def test_names_and_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='did you mean "soak-600s"'):
        scenario.load("soak-60s")
    with pytest.raises(UserError, match="no such file"):
        scenario.load(tmp_path / "none.yaml")


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, SMALL, "base.yaml")
    over = write(
        tmp_path,
        "extends: base.yaml\nclasses: {arithmetic: {weight: 3}}\nphases: [{kind: measure, count: 5}]\n",
    )
    scene = scenario.load(over)
    assert set(scene.classes) == {"chat_short", "arithmetic"}
    assert [p.count for p in scene.phases] == [5]


def test_a_mistake_below_an_extends_names_the_file_that_made_it(tmp_path: Path) -> None:
    base = write(tmp_path, SMALL + "seed: x\n", "base.yaml")
    with pytest.raises(UserError, match=f"{base}:6: seed"):
        scenario.load(write(tmp_path, "extends: base.yaml\nconcurrency: 3\n"))


def test_a_loop_of_extends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loop"):
        scenario.load(write(tmp_path, "extends: s.yaml\n"))


def test_set_reaches_every_value_and_a_phase_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    scene = scenario.load(
        path,
        ["concurrency=9", "phases.measure.duration=2h", "phases.0.drain=1s", "limits.idle_timeout=5s", "rules.swap={}"],
    )
    assert (scene.concurrency, scene.phases[0].duration, scene.phases[0].drain) == (9, 7200, 1)
    assert scene.limits.idle_timeout == 5
    assert scene.rules == {"swap": {}}


@pytest.mark.parametrize(
    ("override", "say"),
    [
        ("concurrency", "key=value"),
        ("phases.warmpu.duration=1s", "no entry"),
        ("concurency=3", 'did you mean "concurrency"'),
        ("name.x=3", "nothing stands below"),
        ("seed=[", "not valid YAML"),
    ],
)
def test_a_bad_set_is_one_line(tmp_path: Path, override: str, say: str) -> None:
    with pytest.raises(UserError, match=say) as caught:
        scenario.load(write(tmp_path, SMALL), [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_that_ships_loads_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    scene = scenario.load(name)
    assert scene.about
    text = scenario.dump(scene)
    assert scenario.load(write(tmp_path, text)) == scene
    assert (scenario.folder() / f"{name}.yaml").read_text(encoding="utf-8").startswith("# PASS means:")


@pytest.mark.parametrize("name", scenario.names())
def test_a_scenario_requires_only_what_its_length_can_judge(name: str) -> None:
    scene = scenario.load(name)
    expected = expect.samples(scene, prefill_per_s=1000, decode_per_s=20)
    assert not set(expect.out_of_reach(scene, expected)) & set(scene.require)


def test_duration_shortens_the_measuring_phase_and_keeps_the_warm_up_small() -> None:
    scene = scenario.load("soak-600s", duration=Seconds(60))
    lengths = {phase.kind: phase.duration for phase in scene.phases}
    assert lengths == {"functional": None, "warmup": 12, "measure": 60}


def test_expected_samples_follow_littles_law() -> None:
    scene = scenario.load("soak-600s")
    expected = expect.samples(scene, prefill_per_s=2000, decode_per_s=40)
    busy = sum(
        n * expect.service_s(scene.classes[name], name, prefill_per_s=2000, decode_per_s=40)
        for name, n in expected.items()
    )
    assert busy == pytest.approx(4 * 600)


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), (90, 90), ("250ms", 0.25), ("1h30m", 5400), ("10m", 600), ("1.5s", 1.5), ("2d", 172800)],
)
def test_durations(text: object, value: float) -> None:
    assert strict.seconds(text) == value


@pytest.mark.parametrize("text", ["", "1x", "s", "1h 30", None, True, -1, "-1s", float("nan"), float("inf")])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        strict.seconds(text)


@pytest.mark.parametrize(
    ("text", "value"), [("8k", 8192), (17, 17), ("262144", 262144), ("1m", 1 << 20), ("0.5k", 512)]
)
def test_token_counts(text: object, value: int) -> None:
    assert strict.tokens(text) == Tokens(value)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda e: st.lists(e) | st.dictionaries(st.text(), e)))
def test_no_value_at_any_place_breaks_the_reader(value: object) -> None:
    for key in ("classes", "phases", "target", "limits", "monitors", "rules", "require", "slo", "seed", "name"):
        data = {"name": "x", "classes": {"chat_short": {"weight": 1}}, "phases": [{"kind": "measure", "count": 1}]}
        with contextlib.suppress(strict.StrictError):
            scenario.check(strict.build(scenario.Scenario, {**data, key: value}))


def test_the_schema_knows_every_key_and_no_other() -> None:
    definition = scenario.schema()["$defs"]["Scenario"]
    assert definition["additionalProperties"] is False
    assert set(definition["properties"]) == {*scenario.Scenario.__dataclass_fields__, "extends"}


def test_plug_ins_are_found_by_their_file_alone() -> None:
    assert {"chat_short", "arithmetic", "json", "long_context", "generate"} <= set(plugins.names("workloads"))
    assert "words" not in plugins.names("workloads")
    assert {"host", "process", "kernel", "nvidia", "engine"} <= set(plugins.names("monitors"))
    assert "lane" not in plugins.names("monitors")
    for kind in plugins.KINDS:
        for name in plugins.names(kind):
            assert plugins.about(kind, name)


def test_a_third_partys_plug_in_is_named_with_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_pkg.py").write_text(
        '"""A workload from elsewhere."""\n'
        "from workloads.chat_short import Options, sessions\n__all__ = ['Options', 'sessions']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="no workload"):
        plugins.load("workloads", "foreign_pkg")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "chat.py").write_text((tmp_path / "foreign_pkg.py").read_text())
    assert plugins.load("workloads", "foreign.chat").__doc__ == "A workload from elsewhere."
