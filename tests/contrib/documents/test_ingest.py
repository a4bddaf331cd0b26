import ctypes
import gzip
import hashlib
import io
import json
import os
import shutil

import pytest
from rich.console import Console
from tiny_documents import PAGE, SENTENCE, chapter, write_docx, write_epub, write_pdf

from cpt.contrib.documents import ingest as ingesting
from cpt.contrib.documents.command import show_ingested
from cpt.contrib.documents.errors import NotConverted
from cpt.contrib.documents.ingest import convert_file, find_documents, ingest, run_isolated
from cpt.errors import DataError, LaunchError, ResourceError
from cpt.files import locked

pytestmark = pytest.mark.heavy  # each file is converted in a process of its own
FAILED = {"scan.pdf": "no text, a scan?", "empty.md": "empty file"}


@pytest.fixture(autouse=True)
def one_worker(monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "1")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Two PDFs, a DOCX, an EPUB, a web page, a text; a duplicate, a scan, an empty file and a picture."""
    folder = tmp_path_factory.mktemp("documents") / "library"
    folder.mkdir()
    write_pdf(folder / "a.pdf", [[SENTENCE, SENTENCE]], title="On catalysts")
    write_pdf(folder / "b.pdf", [[f"Page {letter} of it."] for letter in "xyz"])
    write_docx(folder / "c.docx")
    write_epub(folder / "d.epub", {"1.xhtml": chapter(f"<p>{SENTENCE}</p>")}, title="On catalysts")
    (folder / "e.html").write_text(PAGE)
    (folder / "f.txt").write_text("Plain text.\n")
    shutil.copy(folder / "a.pdf", folder / "g.pdf")
    write_pdf(folder / "scan.pdf", 2)
    (folder / "empty.md").touch()
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture(scope="module")
def ingested(library):
    return ingest([library], library.parent / "out")


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of six short texts, converted without a worker process, which takes a second to start."""
    monkeypatch.setattr(ingesting, "map_in_order", lambda prepare, batch, _: map(prepare(), batch))
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} {SENTENCE}\n")
    return tmp_path / "texts"


def rows_of(output):
    return [
        json.loads(line)
        for file in sorted(output.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def bytes_of(output):
    return {file.name: file.read_bytes() for file in output.glob("*.jsonl")}


def reasons(done):
    return {entry.path.rpartition("/")[2]: entry.reason for entry in done.failed}


def test_documents_become_rows_and_the_others_are_listed(library, ingested):
    rows = rows_of(library.parent / "out")
    formats = {row["path"].rpartition("/")[2]: row["format"] for row in rows}
    expected = {
        "a.pdf": "pdf",
        "b.pdf": "pdf",
        "c.docx": "docx",
        "d.epub": "epub",
        "e.html": "html",
        "f.txt": "txt",
    }
    assert formats == expected
    assert list(rows[0]) == ["text", "path", "sha256", "format", "title", "pages", "converter"]
    assert rows[1]["pages"] == 3 and "pages" not in rows[2]
    assert {row["title"] for row in rows[:1] + rows[2:5]} == {"On catalysts"} and rows[5][
        "title"
    ] is None
    assert rows[0]["sha256"] == hashlib.sha256((library / "a.pdf").read_bytes()).hexdigest()
    assert reasons(ingested) == FAILED and ingested.passed_over == {".png": 1}
    counts = {"files": 4, "documents": 2, "pages": 4, "duplicates": 1, "failed": 1}
    assert ingested.new["pdf"].items() >= counts.items()
    listed = {
        json.loads(line)["path"].rpartition("/")[2]
        for line in ingested.failed_file.read_text().splitlines()
    }
    assert listed == {*FAILED, "g.pdf"}


def test_the_bytes_do_not_depend_on_the_number_of_workers(library, ingested, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "2")
    ingest([library], tmp_path / "two")
    assert bytes_of(library.parent / "out") == bytes_of(tmp_path / "two")


def test_a_second_run_converts_new_files_and_keeps_the_texts_of_changed_ones(texts, tmp_path):
    (texts / "empty.md").touch()
    ingest([texts], tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    (texts / "1.txt").write_text("Something else.")
    (texts / "new.txt").write_text("New.")
    done = ingest([texts], tmp_path / "out")
    assert done.num_changed == 1 and {
        kind: counts["files"] for kind, counts in done.new.items()
    } == {"txt": 1}
    assert reasons(done) == {"empty.md": "empty file"}
    assert (
        bytes_of(tmp_path / "out").items() > before.items()
        and rows_of(tmp_path / "out")[-1]["text"] == "New."
    )


def test_another_text_of_the_same_size_and_time_is_noticed(texts, tmp_path):
    ingest([texts], tmp_path / "out")
    file = texts / "1.txt"
    status = file.stat()
    file.write_text(file.read_text().replace("1", "8"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert ingest([texts], tmp_path / "out").num_changed == 1
    assert ingest([texts], tmp_path / "out").num_changed == 1  # not only once


def without_status(output):
    """Make the journal one of an earlier version."""
    for part in (output / ".ingest").glob("journal-*.jsonl"):
        entries = [json.loads(line) for line in part.read_text().splitlines()]
        for entry in entries:
            del entry["inode"], entry["ctime_ns"]
        part.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def copied_in_place(texts):
    shutil.copytree(texts, texts.parent / "copy")
    shutil.rmtree(texts)
    (texts.parent / "copy").rename(texts)


@pytest.mark.parametrize("is_copied", [True, False])
def test_the_same_texts_in_a_copy_or_an_older_record_are_known(texts, tmp_path, is_copied):
    output = tmp_path / "out"
    (texts / "broken.txt.gz").write_bytes(gzip.compress(b"text")[:-9])
    ingest([texts], output)
    if is_copied:
        copied_in_place(texts)
    else:
        without_status(output)
    before = bytes_of(output)
    done = ingest([texts], output)
    assert (done.num_known, done.num_changed, done.new) == (7, 0, {})
    assert bytes_of(output) == before
    journal = sorted((output / ".ingest").glob("journal-*.jsonl"))
    inodes = {json.loads(line)["inode"] for line in journal[-1].read_text().splitlines()}
    assert inodes == {file.stat().st_ino for file in texts.iterdir()}
    ingest([texts], output)  # the record is renewed once
    assert sorted((output / ".ingest").glob("journal-*.jsonl")) == journal


@pytest.mark.parametrize("stops_at", ["documents-00001.jsonl", "journal-00001.jsonl"])
def test_an_interrupted_run_resumes_to_the_same_bytes(texts, tmp_path, monkeypatch, stops_at):
    monkeypatch.setattr(ingesting, "BATCH_FILES", 3)
    ingest([texts], tmp_path / "straight")
    write = ingesting.write_lines

    def stop(file, lines):
        if file.name == stops_at:
            raise KeyboardInterrupt
        write(file, lines)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ingesting, "write_lines", stop)
        ingest([texts], tmp_path / "out")
    done = ingest([texts], tmp_path / "out")
    assert done.num_known == 3 and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


def test_only_one_process_writes_and_only_where_it_may(texts, tmp_path):
    with locked(tmp_path / "out/.ingest/lock", ""), pytest.raises(LaunchError):
        ingest([texts], tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError):
        ingest([texts], tmp_path / "file")


def test_a_folder_is_searched_for_documents_by_suffix(tmp_path):
    for name in (
        "a.txt",
        "b.pdf",
        "c.txt.gz",
        "d.yaml.gz",
        "sub/deep/page.HTM",
        "sub/no_suffix",
        "sub/photo.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in (".git/hidden.txt", "sub/.hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files, others = find_documents([tmp_path], tmp_path / "out")
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "a.txt",
        "b.pdf",
        "c.txt.gz",
        "sub/deep/page.HTM",
    ]
    assert others == {".png": 1, ".yaml": 1, "no suffix": 1}


def test_a_folder_in_the_output_folder_is_refused_and_a_file_there_is_not(texts):
    assert find_documents([texts / "1.txt"], texts)[0]
    for folder in (texts, texts.parent):
        with pytest.raises(DataError, match="output folder"):
            find_documents([texts], folder)


def test_what_is_not_in_the_text_is_counted_by_kind_and_shown(tmp_path):
    media = '<img src="a.png"><img src="b.png"><iframe src="https://x.y"></iframe>'
    formula = "<math><mmultiscripts><mi>U</mi></mmultiscripts></math>"
    (tmp_path / "a.html").write_text(f"<html><p>{SENTENCE} {formula}</p>{media}")
    (tmp_path / "b.html").write_text("<html><p>two</p><img src=c.png>")
    write_pdf(tmp_path / "c.pdf", [[SENTENCE], [], []])
    expected = {
        "images": 3,
        "embedded pages and media": 1,
        "formulas without their layout": 1,
        "pages without text": 2,
    }
    done = ingest([tmp_path], tmp_path / "out")
    assert done.dropped == expected and done.num_losing["images"] == 2
    assert [row.get("dropped", {}).get("images") for row in rows_of(tmp_path / "out")] == [
        2,
        1,
        None,
    ]
    console = Console(file=io.StringIO(), width=200)
    show_ingested(console, done)
    assert all(
        f"{kind} {count} (in " in console.file.getvalue() for kind, count in expected.items()
    )


@pytest.mark.parametrize("name", ["a.pdf", "f.txt"])
def test_compressed_files_are_read(library, ingested, tmp_path, name):
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((library / name).read_bytes()))
    assert convert_file(20.0, frozenset(), packed)[1]["text"] in [
        row["text"] for row in rows_of(library.parent / "out")
    ]
    packed.write_bytes(packed.read_bytes()[:-9])
    assert convert_file(20.0, frozenset(), packed)[0].reason


# A converter in a process of its own


def refuse(argument):
    raise NotConverted("encrypted", "with a password")


def fail(argument):
    return {}["missing"]


def take_memory(argument):
    return bytearray(8 * 2**30)


def crash(argument):
    ctypes.string_at(0)


def leave(argument):
    os._exit(3)


def hang_in_c(argument):
    """Python never gets to run a handler in between."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(1000)


@pytest.mark.parametrize(
    "function, reason, detail",
    [
        (refuse, "encrypted", "with a password"),
        (fail, "the converter failed", "KeyError"),
        (take_memory, "too much memory", "4.0 GiB"),
        (crash, "the converter crashed", "SIGSEGV"),
        (leave, "the converter crashed", "3"),
        (hang_in_c, "took too long", ""),
    ],
)
def test_whatever_goes_wrong_in_a_converter_becomes_a_reason(function, reason, detail):
    with pytest.raises(NotConverted) as raised:
        run_isolated(function, None, 0.2 if function is hang_in_c else 20.0)
    assert raised.value.reason == reason and detail in raised.value.detail


def test_shared_lines_are_reported_and_dropped_by_one_option_also_later(tmp_path, texts):
    for number in range(30):
        page = f"Home and about and help\n\nText {number} about {number * 7}.\n"
        (texts / f"page{number}.txt").write_text(page)
    done = ingest([texts], tmp_path / "out")
    assert done.shared.found() == {"Home and about and help": 30} and not done.dropped_lines
    console = Console(file=io.StringIO(), width=200)
    show_ingested(console, done)
    assert "--drop-shared-lines" in console.file.getvalue()
    done = ingest([texts], tmp_path / "out", drop_shared_lines=True)
    assert done.dropped_lines == ["Home and about and help"]
    (texts / "later.txt").write_text("Home and about and help\n\nText of later.")
    ingest([texts], tmp_path / "out")
    rows = {row["path"].rpartition("/")[2]: row for row in rows_of(tmp_path / "out")}
    assert rows["later.txt"]["text"] == "Text of later." and "dropped" not in rows["0.txt"]
    assert rows["page3.txt"]["dropped"] == {"characters of shared lines": 25}
