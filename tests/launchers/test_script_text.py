import pytest

from cpt.launchers.script_text import filled


def test_names_are_replaced_and_bash_is_left_alone():
    assert filled('\n${x} @NAME@: "$@" a@b.c %x@@SECONDS@', name="run", seconds=3) == '${x} run: "$@" a@b.c %x@3'


def test_a_name_without_a_value_is_not_forgotten():
    with pytest.raises(KeyError):
        filled("@NAME@")
