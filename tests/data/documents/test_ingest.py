import json
import shutil

import pytest
from tiny_documents import PAGE, SENTENCE, chapter, write_docx, write_epub, write_pdf

from cpt.data.documents import ingest as ingesting
from cpt.data.documents.ingest import ingest
from cpt.errors import LaunchError, ResourceError
from cpt.files import locked


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


def test_the_bytes_do_not_depend_on_the_number_of_workers(library, tmp_path, monkeypatch):
    ingest([library], tmp_path / "one")
    monkeypatch.setenv("CPT_WORKERS", "2")
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


def test_a_changed_file_keeps_its_text_and_is_counted(library, tmp_path):
    ingest([library], tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    write_pdf(library / "a.pdf", [["Something else."]])
    (library / "empty.md").write_text("No longer empty.")
    done = ingest([library], tmp_path / "out")
    assert done.num_changed == 1 and bytes_of(tmp_path / "out").items() > before.items()
    assert rows_of(tmp_path / "out")[-1]["text"] == "No longer empty."


@pytest.mark.parametrize("stops_at", ["documents-00002.jsonl", "journal-00002.jsonl"])
def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path, monkeypatch, stops_at):
    library = tmp_path / "library"
    library.mkdir()
    for number in range(20):
        (library / f"{number:02}.txt").write_text(f"{number} {SENTENCE}\n")
    monkeypatch.setattr(ingesting, "BATCH_FILES", 4)
    ingest([library], tmp_path / "straight")
    write = ingesting.write_lines

    def stop(file, lines):
        if file.name == stops_at:
            raise KeyboardInterrupt
        write(file, lines)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ingesting, "write_lines", stop)
        ingest([library], tmp_path / "out")
    done = ingest([library], tmp_path / "out")
    assert done.num_known == 8 and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")
    assert len(bytes_of(tmp_path / "out")) == 5


def test_only_one_process_writes_and_only_where_it_may(library, tmp_path):
    with locked(tmp_path / "out/.ingest/lock", ""), pytest.raises(LaunchError):
        ingest([library], tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError):
        ingest([library], tmp_path / "file")
