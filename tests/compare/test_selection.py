from __future__ import annotations

from itertools import islice

import pytest

from tests.toy_training import train
from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.compare.selection import Selection
from upguard_plugin.errors import UsageError
from upguard_plugin.records import EventKey


def key(boundary, role="output", phase="forward") -> EventKey:
    return EventKey(boundary, phase, role, "0", "float32", ())


def test_numbers_and_ranges():
    selection = Selection.parse(steps="4-6, 10,20-", ranks="0")

    assert [n for n in range(30) if selection.has_step(n)] == [4, 5, 6, 10, *range(20, 30)]
    assert (selection.has_rank(0), selection.has_rank(1)) == (True, False)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-2", "1-2-3", "1.5"])
def test_what_is_no_list_of_numbers_is_refused(text):
    with pytest.raises(UsageError, match="is not a list of numbers and ranges"):
        Selection.parse(steps=text)


def test_a_glob_takes_in_what_lies_below():
    selection = Selection.parse(modules="blocks.*.mlp, head")

    assert selection.has_key(key("blocks.0.mlp"))
    assert selection.has_key(key("blocks.0.mlp.fc1.weight"))
    assert selection.has_key(key("head.weight"))
    assert not selection.has_key(key("blocks.0.mlpx"))
    assert not selection.has_key(key("heads"))


def test_roles_and_phases_are_checked_with_the_nearest_right_one():
    assert not Selection.parse(roles="param,grad").has_key(key("head"))
    assert Selection.parse(roles="output", phase="forward").has_key(key("head"))
    with pytest.raises(UsageError) as caught:
        Selection.parse(roles="params")
    assert str(caught.value).startswith("--roles does not know 'params'\n  known  input, output,")
    assert str(caught.value).endswith("try    --roles param")


def test_what_is_lacking_is_found_without_counting_to_the_end():
    numbers = Selection.parse(steps="3-5,1-4,9-,0-999999999999").steps

    assert list(islice(numbers.without({0, 1, 4, 9}), 5)) == [2, 3, 5, 6, 7]
    assert list(Selection.parse(steps="3-5,1-4,9-").steps.without({1, 4})) == [2, 3, 5, 9]


@pytest.mark.parametrize("option", ["steps", "ranks"])
def test_a_range_that_is_far_too_long_is_answered_at_once(option):
    asked = Selection.parse(**{option: "0-999999999999"})

    verdict = compare_runs(train(num_steps=2), train(num_steps=2), asked)

    assert verdict.exit_code == 3
    first = 2 if option == "steps" else 1
    listed = ", ".join(str(n) for n in range(first, first + 8))
    assert f"{listed} and more" in verdict.notes[0]
