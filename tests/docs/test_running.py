"""A page is run as its reader does it, and a command that does not do what the page says fails it."""

import os
import time

import pytest
from documented.blocks import PageError, read_blocks
from documented.running import run_blocks


@pytest.fixture
def run(tmp_path):
    def run_page(text, ports=()):
        (tmp_path / "page.md").write_text(text)
        folder = tmp_path / "page"
        folder.mkdir()
        run_blocks(read_blocks(tmp_path / "page.md"), folder, ports)
        return folder

    return run_page


def test_blocks_are_run_in_order_in_one_shell_and_one_folder(run):
    text = (
        "```\nexport A=1\nmkdir sub; cd sub\n```\n\n```bash\necho $A > a\n```\n\n<!-- needs: gpu -->\n```\nexit"
        " 1\n```\n"
    )
    assert (run(text) / "sub" / "a").read_text() == "1\n"


def test_files_are_written_when_their_turn_comes(run):
    text = (
        "```\ntest ! -e my/a.py\n```\n\n<!-- file: my/a.py -->\n```python\nprint('seen 7')\n```\n\n```\n$ python"
        " my/a.py\nseen 8\n```\n"
    )
    assert (run(text) / "my" / "a.py").exists()


def test_a_failing_command_in_the_middle_fails_the_page(run):
    with pytest.raises(PageError, match="ended with 1, not with 0"):
        run("```\nfalse\ntrue\n```\n")


def test_a_failing_command_before_a_pipe_fails_the_page(run):
    with pytest.raises(PageError, match="ended with 1"):
        run("```\nfalse | cat\n```\n")


def test_a_command_that_should_fail_and_does_not_fails_the_page(run):
    with pytest.raises(PageError, match="ended with 0, not with 2"):
        run("<!-- exit: 2 -->\n```\n$ true\n```\n")


def test_a_command_may_fail_as_the_page_says(run):
    run("<!-- exit: 2 -->\n```\n$ echo begun\nbegun\n$ echo no >&2; exit 2\nno\n```\n")


def test_output_that_differs_fails_the_page(run):
    with pytest.raises(PageError, match="shown, but not printed there:\n  It failed"):
        run("```\n$ echo It worked\nIt failed\n```\n")


def test_output_in_a_block_of_its_own_is_compared_where_the_page_says_so(run):
    run("```\necho 1 loss\n```\n\n<!-- prints -->\n```text\n2 loss\n```\n\n```text\nanything\n```\n")


def test_output_in_a_block_of_its_own_that_differs_fails_the_page(run):
    with pytest.raises(PageError, match="not printed"):
        run("```\necho loss\n```\n\n<!-- prints -->\n```text\ngain\n```\n")


def test_a_program_that_fails_fails_the_page(run):
    with pytest.raises(PageError, match="KeyError"):
        run("```python\n{}['a']\n```\n")


def test_nothing_can_be_written_outside_of_the_folder(run):
    with pytest.raises(PageError, match="outside"):
        run("<!-- file: ../a -->\n```text\n1\n```\n")


SERVER = """\
<!-- until: Ready at 4711 -->
```
echo $$ > id; echo "Ready at 4711"; sleep 600
```

```
$ echo 4711 > port; test -e /proc/$(cat id)
```
"""


def test_a_server_goes_on_until_the_page_ends_on_a_port_that_is_free(run):
    begun = time.monotonic()
    folder = run(SERVER, ports=[4711])
    assert (folder / "port").read_text().strip() not in ("", "4711") and time.monotonic() - begun < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "id").read_text()), 0)


def test_a_server_that_ends_by_itself_fails_the_page(run):
    with pytest.raises(PageError, match="ended before it printed `Ready`"):
        run("<!-- until: Ready -->\n```\necho Raedy\n```\n")
