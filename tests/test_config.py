from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upguard_plugin.config import UpGuardConfig, environment_switch, load_config
from upguard_plugin.config_values import Dump
from upguard_plugin.errors import ConfigError

DOCS = Path(__file__).parents[1] / "docs"


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **{"environ": {}, **kwargs})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_without_any_source_the_defaults_hold():
    assert load_config(environ={}) == UpGuardConfig()
    assert UpGuardConfig().level == "module"


def test_each_source_wins_over_the_one_before(tmp_path):
    file = tmp_path / "upguard.json"
    file.write_text('{"level": "stage", "program": "file", "interval": 3, "steps": "0-9"}')
    environ = {"UPGUARD_CONFIG": str(file), "UPGUARD_PROGRAM": "env", "UPGUARD_INTERVAL": "4"}

    config = load_config(
        {"interval": 5, "sketch": True},
        flags={"--upguard-sketch": False, "--upguard-ranks": None},
        block={"level": "op", "overwrite": True},
        environ=environ,
    )

    assert config == UpGuardConfig(
        overwrite=True,  # block
        level="stage",  # file over block
        program="env",  # environment over file
        interval=5,  # argument over environment
        sketch=False,  # flag over argument
        steps="0-9",
    )


def test_a_path_argument_is_the_file_and_the_environment_wins_over_it(tmp_path):
    file = tmp_path / "upguard.yaml"
    file.write_text("level: op\nsteps: 4-6,10\nmodules: [blocks.*, '!*.dropout']\n")

    config = load_config(file, environ={"UPGUARD_LEVEL": "stage", "UPGUARD_CONFIG": "/nowhere"})

    assert (config.level, config.steps) == ("stage", "4-6,10")
    assert config.modules == ("blocks.*", "!*.dropout")


def test_a_framework_config_serves_as_the_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "upguard": {"level": "op"}}')
    assert UpGuardConfig.from_file(file).level == "op"


def test_a_finished_config_is_taken_as_it_is():
    config = UpGuardConfig(level="op")
    assert load_config(config, environ={"UPGUARD_LEVEL": "stage"}) == config


def test_upguard_0_disables_whatever_else_is_said():
    environ = {"UPGUARD": "0", "UPGUARD_LEVLE": "op"}
    assert not load_config({"enabled": True}, environ=environ).enabled
    assert load_config({"enabled": True}, environ={}).enabled


def test_upguard_1_enables_over_a_block_that_disables():
    assert load_config(block={"enabled": False}, environ={"UPGUARD": "1"}).enabled
    assert not load_config(block={"enabled": False}, environ={}).enabled


def test_the_switch_of_the_environment_has_three_states():
    states = [environment_switch(e) for e in ({"UPGUARD": "on"}, {"UPGUARD": "0"}, {})]
    assert states == [True, False, None]


def test_every_kind_of_value_is_read_from_text():
    environ = {
        "UPGUARD_STEPS": " 4-6, 10",
        "UPGUARD_RANKS": "0",
        "UPGUARD_MODULES": "blocks.*,!*.dropout",
        "UPGUARD_ROLES": "output,grad",
        "UPGUARD_SKETCH": "yes",
        "UPGUARD_DUMP": '{"boundary": "blocks.*", "steps": "5"}',
        "UPGUARD_CHECK": "10",
        "UPGUARD_MAX_BYTES": "1.5KiB",
    }
    assert load_config(environ=environ) == UpGuardConfig(
        steps="4-6,10",
        ranks="0",
        modules=("blocks.*", "!*.dropout"),
        roles=("output", "grad"),
        sketch=True,
        dump=Dump("blocks.*", "5"),
        check=10,
        max_bytes=1536,
    )


def test_what_to_mapping_gives_survives_json_and_comes_back():
    config = UpGuardConfig(dump=Dump("a", "1-"), modules=("a", "!b"), max_bytes=5, check=True)
    assert UpGuardConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"argument": {"levle": "op"}},
            "unknown setting 'levle' in the config argument\n  nearest  level",
        ),
        (
            {"environ": {"UPGUARD_LEVLE": "op"}},
            "unknown setting 'UPGUARD_LEVLE' in the environment\n  nearest  UPGUARD_LEVEL",
        ),
        (
            {"flags": {"--levle": "op"}},
            "unknown setting '--levle' in flags\n  nearest  --level",
        ),
        (
            {"environ": {"UPGUARD_LEVEL": "modul"}},
            "cannot use level = 'modul' from environment variable UPGUARD_LEVEL: "
            "expected stage, module or op\n  nearest  module",
        ),
        (
            {"block": {"enabled": "true"}, "block_source": "ds.json, block upguard"},
            "cannot use enabled = 'true' from ds.json, block upguard: expected true or false",
        ),
        (
            {"argument": {"interval": 0}},
            "cannot use interval = 0 from the config argument: "
            "expected a whole number of at least 1",
        ),
        (
            {"argument": {"steps": "6-4"}},
            "cannot use steps = '6-4' from the config argument: "
            'expected numbers and ranges such as "4-6,10"',
        ),
        (
            {"argument": {"dump": {"boundry": "x"}}},
            "unknown setting 'boundry' in dump from the config argument\n  nearest  boundary",
        ),
        (
            {"argument": {"roles": ["output", "grads"]}},
            "unknown role 'grads' in roles from the config argument\n  nearest  grad",
        ),
        (
            {"flags": {"--max-bytes": "2 gigs"}},
            "cannot use max_bytes = '2 gigs' from flag --max-bytes: "
            'expected a size such as 1000000 or "2GiB"',
        ),
        (
            {"argument": {"steps": "4-6"}, "environ": {"UPGUARD_INTERVAL": "10"}},
            "steps 4-6 holds no multiple of 10\n"
            "  steps     '4-6' from the config argument\n"
            "  interval  10 from environment variable UPGUARD_INTERVAL",
        ),
        (
            {"argument": {"steps": "4-6", "dump": {"boundary": "*", "steps": "7"}}},
            "dump asks for steps 7, none of which is recorded\n"
            "  dump   {'boundary': '*', 'steps': '7'} from the config argument\n"
            "  steps  '4-6' from the config argument",
        ),
        (
            {"argument": {"modules": "a,!a"}},
            "modules includes and excludes 'a'\n  modules  'a,!a' from the config argument",
        ),
        (
            {"argument": {"level": "stage", "weights_in_use": "all"}},
            "weights_in_use = 'all' needs modules, which level 'stage' does not record\n"
            "  weights_in_use  'all' from the config argument\n"
            "  level           'stage' from the config argument",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_its_key_and_source(kwargs, message):
    argument = kwargs.pop("argument", None)
    assert refusal(argument, **kwargs) == message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"level": "op"', "Expecting ',' delimiter: line 1 column 15 (char 14)"),
        ("c.json", '{"level": "op", "level": "op"}', "key 'level' is given twice"),
        ("c.json", "[1]", "expected keys and values"),
        ("c.yaml", "- 1", "expected keys and values"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    assert refusal(file) == f"cannot read the config file {file}: {message}"


def test_a_missing_file_is_refused_by_name():
    expected = "cannot read the config file /no/such.json: No such file or directory"
    assert refusal(environ={"UPGUARD_CONFIG": "/no/such.json"}) == expected


def test_a_constructor_call_is_validated_too():
    with pytest.raises(ConfigError, match="cannot use level = 'modul' from UpGuardConfig"):
        UpGuardConfig(level="modul")


def test_steps_and_interval_select_together():
    config = UpGuardConfig(steps="4-6,10-", interval=2)
    assert [s for s in range(16) if config.selected_step(s)] == [4, 6, 10, 12, 14]
    assert all(UpGuardConfig().selected_step(s) for s in range(5))


def test_a_long_run_asks_for_its_steps_and_no_memory_is_kept():
    config = UpGuardConfig()
    tracemalloc.start()
    assert all(config.selected_step(step) for step in range(1000))
    before = tracemalloc.get_traced_memory()[0]
    assert all(config.selected_step(step) for step in range(1000, 5000))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 4000


def test_ranks_select():
    config = UpGuardConfig(ranks="0,2-3")
    assert [r for r in range(6) if config.selected_rank(r)] == [0, 2, 3]


def test_modules_are_included_and_excluded():
    config = UpGuardConfig(modules="blocks.*,!*.dropout")
    names = ["", "embed", "blocks.0", "blocks.0.mlp", "blocks.0.mlp.dropout"]
    assert [n for n in names if config.selected_module(n)] == ["blocks.0", "blocks.0.mlp"]
    only_excluded = UpGuardConfig(modules=["!*.dropout"])
    assert [n for n in names if only_excluded.selected_module(n)] == names[:-1]


def test_roles_select():
    config = UpGuardConfig(roles=["output", "grad"])
    assert config.selected_role("grad") and not config.selected_role("param")
    assert UpGuardConfig().selected_role("param")


def test_phases_are_words_of_the_trace():
    assert UpGuardConfig(phases="forward,backward").phases == ("forward", "backward")
    with pytest.raises(ConfigError, match="unknown phase 'foward' in phases") as raised:
        UpGuardConfig(phases=["foward"])
    assert raised.value.evidence == {"nearest": "forward"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=5))
def test_ranges_hold_exactly_their_numbers(pairs):
    config = UpGuardConfig(ranks=",".join(f"{first}-{first + more}" for first, more in pairs))
    expected = {n for first, more in pairs for n in range(first, first + more + 1)}
    assert {n for n in range(80) if config.selected_rank(n)} == expected


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**15, 10**15 + 1, 10**4000])
    | st.floats()
    | st.text(max_size=8)
    | st.from_regex(r"(0{0,200}\d{1,30}|9{5000})(-\d{0,30})?( [kmg]ib)?", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(st.sampled_from([f.name for f in dataclasses.fields(UpGuardConfig)]), JSON_VALUES)
def test_any_value_is_taken_or_refused_in_a_sentence(name, value):
    try:
        config = UpGuardConfig.from_mapping({name: value})
    except ConfigError as error:
        assert name in error.sentence
        assert len(str(error)) < 500 and "\n" not in error.sentence
    else:
        assert UpGuardConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize("name", ["steps", "ranks", "interval", "check", "max_bytes"])
def test_a_number_that_is_too_large_is_said_to_be(name):
    value = 10**15 + 1
    said = f"cannot use {name} = {value} from the config argument: expected no number above"

    assert refusal({name: value}) == f"{said} 1000000000000000"
    assert load_config({name: 10**15}, environ={})


def test_long_values_are_cut_in_the_sentence():
    assert refusal({"steps": "9" * 5000}) == (
        f"cannot use steps = '{'9' * 79}... from the config argument: expected no number above "
        "1000000000000000"
    )
    assert refusal({"interval": 10**5000}).startswith(
        "cannot use interval = what is too long to be printed from"
    )
    assert load_config({"steps": "0" * 5000 + "7"}, environ={}).selected_step(7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", f"interval: {'9' * 5000}"),
        ("c.yaml", "program: 2024-99-99"),
        ("c.json", f'{{"interval": {"9" * 5000}}}'),
        ("c.json", "[" * 100_000),
        ("c.yaml", "[" * 10_000),
    ],
)
def test_a_file_that_python_cannot_hold_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)

    assert refusal(tmp_path / name).startswith(f"cannot read the config file {tmp_path / name}: ")


def test_deep_json_in_the_environment_is_refused():
    assert "cannot use dump" in refusal(environ={"UPGUARD_DUMP": "[" * 100_000})


def test_the_documented_table_matches_the_fields():
    rows = [
        line.split(" | ")
        for line in (DOCS / "configuration.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    documented = [(row[0].strip("| `"), row[1].strip("`"), row[3].strip(" |")) for row in rows]
    assert documented == [
        (f.name, json.dumps(f.default), f.metadata["help"])
        for f in dataclasses.fields(UpGuardConfig)
    ]


def test_loading_the_config_module_loads_no_framework():
    code = (
        "import sys, upguard_plugin.config; "
        "print([m for m in ('torch', 'numpy', 'yaml', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
