import pytest
from on_terminal import in_pipe, on_terminal

PRINTS = """
import cpt.command_line
from cpt.formatting import open_console
from rich.progress import Progress
from rich.table import Table
from tqdm import tqdm
console = open_console()
console.print("It worked.", style="bold green")
table = Table("what", "where")
table.add_row("a run", "/a/long/path/" + "x" * 90)
console.print(table)
with Progress(console=console, disable=not console.is_interactive) as bar:
    list(bar.track(range(3)))
list(tqdm(range(3), desc="downloads"))
"""
PLAIN = [{"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}]


def is_decorated(text):
    return "\x1b" in text or "\r" in text.replace("\r\n", "\n")  # a terminal ends its lines with both


def test_a_terminal_gets_colours_and_bars():
    said = on_terminal(["-c", PRINTS])
    assert "\x1b[1;32mIt worked." in said and "Working..." in said and "downloads" in said and is_decorated(said)


@pytest.mark.parametrize("asked", PLAIN, ids=lambda asked: next(iter(asked)))
def test_a_terminal_where_plain_text_is_asked_for_gets_no_control_characters(asked):
    said = on_terminal(["-c", PRINTS], **asked)
    assert "It worked." in said and "a run" in said and not is_decorated(said)
    assert "downloads" not in said and "Working" not in said


@pytest.mark.parametrize("more", [{}, {"GITHUB_ACTIONS": "true", "CI": "true"}], ids=["pipe", "actions"])
def test_a_pipe_gets_whole_lines_and_no_control_characters(more):
    said = in_pipe(["-c", PRINTS], **more)
    assert "It worked." in said and not is_decorated(said)
    assert any("/a/long/path/" + "x" * 90 in line for line in said.splitlines())
    assert "downloads" not in said


def test_colours_can_be_forced_into_a_pipe_and_bars_cannot():
    said = in_pipe(["-c", PRINTS], FORCE_COLOR="1", CI="1")
    assert "\x1b[1;32mIt worked." in said and "\r" not in said and "\x1b[?25l" not in said and "Working" not in said


def test_a_file_beside_a_bar_on_the_terminal_misses_nothing(tmp_path):
    """rich's bars take over stdout, whose lines would then stand on the terminal and not in the file."""
    program = (
        "import sys; sys.stdout = open(sys.argv[1], 'w')\n"
        "from cpt.formatting import open_console, while_working\n"
        "with while_working(open_console(stderr=True).status('busy')): print('a line of the log')"
    )
    said = on_terminal(["-c", program, str(tmp_path / "log")])
    assert (tmp_path / "log").read_text() == "a line of the log\n" and "a line" not in said
