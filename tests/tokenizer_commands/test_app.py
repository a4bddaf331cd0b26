import pytest

from cpt.tokenizer_commands.app import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_page(cpt_tokenizer, name):
    code, said = cpt_tokenizer(name, "--help")
    assert code == 0 and f"tokenizer {name} " in said and "Example" in said


def test_all_commands_are_listed(cpt_tokenizer):
    assert all(name in cpt_tokenizer("--help")[1] for name in COMMANDS)


def test_an_unknown_command_is_refused(cpt_tokenizer):
    code, said = cpt_tokenizer("extent")
    assert code == 2 and "No such command" in said
