import json

import pytest
from full_disk import disk_of_its_own, files_end_at, fill

from cpt.files import LinesFile, append
from cpt.runs.folder import keep_lines_until


@pytest.fixture
def disk(tmp_path):
    with disk_of_its_own(tmp_path / "disk", "256k") as folder:
        yield folder


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def line(step, length=300):
    return json.dumps({"step": step, "text": "x" * length})


def test_lines_that_find_no_room_wait_and_are_written_in_their_order(disk, caplog):
    lines = LinesFile(disk / "lines.jsonl")
    lines.add(line(0))
    ballast = fill(disk)
    for step in range(1, 30):  # the first ones still fit into the file's last block
        lines.add(line(step))
    written = steps(lines.path)
    assert len(written) < 30 and lines.write_waiting() == 30 - len(written)
    assert "No space left on device. Its lines wait" in caplog.text
    ballast.unlink()
    lines.add(line(30))
    assert steps(lines.path) == list(range(31)) and not lines.waiting


def test_a_line_that_fits_in_part_leaves_nothing_of_itself(tmp_path):
    append(tmp_path / "lines", "whole\n")
    with files_end_at(10), pytest.raises(OSError, match="No space left"):
        append(tmp_path / "lines", "too long for the disk\n")
    assert (tmp_path / "lines").read_text() == "whole\n"


def test_a_line_after_a_half_one_begins_anew(tmp_path):
    (tmp_path / "lines").write_text('{"st')
    append(tmp_path / "lines", "whole\n")
    assert (tmp_path / "lines").read_text() == '{"st\nwhole\n'


def test_lines_are_taken_out_of_a_file_on_a_full_disk(disk):
    path = disk / "metrics.jsonl"
    path.write_text("".join(f"{line(step)}\n" for step in range(40)) + '{"step": 40, "lo')
    fill(disk)
    keep_lines_until(path, 20)
    assert steps(path) == list(range(21))
    keep_lines_until(path, -1)
    assert path.read_text() == ""
