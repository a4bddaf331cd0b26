import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from tiny_documents import PAGE, SENTENCE, chapter, write_docx, write_epub, write_pdf

from cpt.documents import ingest as ingesting
from cpt.documents.ingest import ingest
from cpt.documents.output import open_output
from cpt.errors import LaunchError, ResourceError


@pytest.fixture(autouse=True)
def one_worker(monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "1")


@pytest.fixture
def library(tmp_path):
    """Two PDFs, a DOCX, an EPUB, a web page, a text; a duplicate, a scan, an empty file and a picture."""
    folder = tmp_path / "library"
    folder.mkdir()
    write_pdf(folder / "a.pdf", [[SENTENCE, SENTENCE]], title="A")
    write_pdf(folder / "b.pdf", [[f"Page {letter} of it."] for letter in "xyz"])
    write_docx(folder / "c.docx")
    write_epub(folder / "d.epub", {"1.xhtml": chapter(f"<p>{SENTENCE}</p>")})
    (folder / "e.html").write_text(PAGE)
    (folder / "f.txt").write_text("Plain text.\n")
    shutil.copy(folder / "a.pdf", folder / "g.pdf")
    write_pdf(folder / "scan.pdf", 2)
    (folder / "empty.md").touch()
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def rows_of(output):
    return [json.loads(line) for file in sorted(output.glob("*.jsonl")) for line in file.read_text().splitlines()]


def bytes_of(output):
    return {file.name: file.read_bytes() for file in output.glob("*.jsonl")}


def reasons(done):
    return {entry.path.rpartition("/")[2]: entry.reason for entry in done.failed}


def test_documents_become_rows_and_what_does_not_is_listed(library, tmp_path):
    done = ingest([library], tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert [(row["path"].rpartition("/")[2], row["format"]) for row in rows] == [
        ("a.pdf", "pdf"),
        ("b.pdf", "pdf"),
        ("c.docx", "docx"),
        ("d.epub", "epub"),
        ("e.html", "html"),
        ("f.txt", "txt"),
    ]
    assert list(rows[0]) == ["text", "path", "sha256", "format", "title", "pages", "converter"]
    assert rows[1]["pages"] == 3 and "pages" not in rows[2] and rows[0]["title"] == "A"
    assert reasons(done) == {"scan.pdf": "no text, a scan?", "empty.md": "empty file"} and done.passed_over == {
        ".png": 1
    }
    assert done.new["pdf"] == {
        "files": 4,
        "documents": 2,
        "pages": 4,
        "characters": done.new["pdf"]["characters"],
        "duplicates": 1,
        "failed": 1,
    }
    listed = {json.loads(line)["path"].rpartition("/")[2] for line in done.failed_file.read_text().splitlines()}
    assert listed == {"scan.pdf", "empty.md", "g.pdf"}


def test_the_bytes_do_not_depend_on_the_number_of_workers_or_batches(library, tmp_path, monkeypatch):
    ingest([library], tmp_path / "one")
    monkeypatch.setenv("CPT_WORKERS", "2")
    monkeypatch.setattr(ingesting, "BATCH_FILES", 3)
    ingest([library], tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_a_second_run_does_only_what_is_new(library, tmp_path):
    ingest([library], tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    (library / "new.txt").write_text("New.")
    done = ingest([library], tmp_path / "out")
    assert done.num_known == 9 and {kind: counts["files"] for kind, counts in done.new.items()} == {"txt": 1}
    assert reasons(done) == {"scan.pdf": "no text, a scan?", "empty.md": "empty file"}
    after = bytes_of(tmp_path / "out")
    assert after.items() > before.items() and rows_of(tmp_path / "out")[-1]["text"] == "New."


def test_a_changed_file_takes_the_place_of_what_it_was(library, tmp_path):
    """And what was its duplicate becomes a document; a new time alone changes nothing."""
    ingest([library], tmp_path / "out")
    write_pdf(library / "a.pdf", [["Something else."]])
    os.utime(library / "b.pdf", ns=(1, 1))
    ingest([library], tmp_path / "out")
    rows = {row["path"].rpartition("/")[2]: row["text"] for row in rows_of(tmp_path / "out")}
    assert len(rows_of(tmp_path / "out")) == len(rows) == 7
    assert rows["a.pdf"] == "Something else." and rows["g.pdf"].startswith(SENTENCE) and "b.pdf" in rows


SCRIPT = """
import sys
from pathlib import Path
from cpt.documents.ingest import ingest
from cpt.documents.output import open_output
from cpt.errors import LaunchError, ResourceError
ingest([Path(sys.argv[1])], Path(sys.argv[2]), shard_mb=1)
"""


def num_recorded(journal):
    return journal.read_text().count("\n") if journal.exists() else 0


@pytest.mark.parametrize("moment", [1, 7, 15, 18])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, moment):
    library = tmp_path / "library"
    library.mkdir()
    for number in range(20):
        (library / f"{number:02}.txt").write_text(f"{number} {SENTENCE}\n" * 2500)
    ingest([library], tmp_path / "straight", shard_mb=1)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(library), str(tmp_path / "out")])
    while process.poll() is None and num_recorded(tmp_path / "out/.ingest/journal.jsonl") < moment:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = ingest([library], tmp_path / "out", shard_mb=1)
    assert done.num_known >= moment and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")
    assert len(bytes_of(tmp_path / "out")) == 4


def test_only_one_process_writes_and_only_where_it_may(tmp_path):
    with open_output(tmp_path, 10), pytest.raises(LaunchError), open_output(tmp_path, 10):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError), open_output(tmp_path / "file", 10):
        pass
