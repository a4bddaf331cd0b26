import json
import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.readers.documents import Document
from cpt.data.readers.sources import (
    can_be_cut,
    cannot_read,
    files_of,
    jobs_of,
    kind_of,
    pieces_of,
    read_piece,
    states_of,
)
from cpt.errors import DataError, RecipeError, ResourceError
from cpt.recipe.schema import Source


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.txt", "sub/x.py", ".git/d.txt", "sub/.e.txt", "sub.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub/d.jsonl").write_text('{"text": "D"}')
    return tmp_path


def test_what_is_local_and_what_is_a_hub_dataset(folder, monkeypatch):
    monkeypatch.chdir(folder)
    kinds = {
        "word": "local",
        "sub/missing": "local",
        "one/two/three": "local",
        "a.jsonl.gz": "local",
        "a/*": "local",
        "HuggingFaceFW/fineweb-edu": "hub",
        "owner/name.v1": "hub",
        "s3://bucket/a.jsonl": "url",
        "my_lab.data:dump": "function",
    }
    assert {path: kind_of(path) for path in kinds} == kinds


def test_files_of_a_source_are_sorted_folder_by_folder(folder):
    names = [file.name for file in files_of(Source(path=str(folder)), "k")]
    assert names == [
        str(folder / name) for name in ("a.md", "b.txt", "sub/c.txt", "sub/d.jsonl", "sub.txt")
    ]


def test_states_follow_files_and_what_a_server_says_of_them(folder):
    before = states_of(Source(path=str(folder)), "k")
    os.utime(folder / "b.txt", ns=(1, 1))
    after = states_of(Source(path=str(folder)), "k")
    assert [name for name, *_ in before] == [name for name, *_ in after] and before != after
    memory = fsspec.filesystem("memory")
    memory.pipe("/states/a.txt", b"one")
    (first,) = states_of(Source(path="memory://states"), "k")
    memory.pipe("/states/a.txt", b"two")
    assert states_of(Source(path="memory://states"), "k") != [first] and first[:2] == (
        "memory:///states/a.txt",
        3,
    )
    assert states_of(Source(path="my_lab:dump"), "k") == []


@pytest.mark.parametrize(
    "path", ["missing.jsonl", "./missing", "corpus", "nothing/*.jsonl", "sub/*.py", "a.pdf"]
)
def test_a_path_that_cannot_be_read_is_refused_with_its_key(folder, monkeypatch, texts, path):
    monkeypatch.chdir(folder)
    (folder / "a.pdf").touch()
    with pytest.raises(DataError, match="`k.path`" if path != "a.pdf" else "cpt data ingest"):
        texts(path)


@pytest.mark.parametrize(
    ("path", "options", "key"),
    [
        ("my_lab_sources:dump", {"cuont": 3}, "`k.options.cuont`.*`count`"),
        ("my_lab_sources:nothing", {}, "null"),
        ("no_such_lab:dump", {}, "no_such_lab"),
    ],
)
def test_a_source_of_the_users_that_gives_nothing_is_refused(
    tmp_path, monkeypatch, read, path, options, key
):
    (tmp_path / "my_lab_sources.py").write_text(
        "def dump(*, count: int = 1):\n    yield 'text'\ndef nothing():\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=key):
        read(path, options=options)


ROWS_OF_A_FUNCTION = """
def dump():
    yield "a text"
    yield {"text": "of a row", "n": 3}
    yield 5
    yield "a NUL \\0"
    yield {"body": "x"}
    yield "a lone \\ud800"

def stops():
    from cpt.errors import DataError
    yield "a text"
    raise DataError("the store is gone")
"""


def test_rows_of_a_function_are_texts_or_rows_and_others_are_bad(tmp_path, monkeypatch, read):
    (tmp_path / "my_lab_rows.py").write_text(ROWS_OF_A_FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        item.text if isinstance(item, Document) else (item.reason, item.where, item.content)
        for item in read("my_lab_rows:dump")
    ]
    where = "my_lab_rows:dump: item"
    assert found == [
        "a text",
        "of a row",
        ("wrong type", f"{where} 3", b"5"),
        ("NUL byte", f"{where} 4", b"a NUL \0"),
        ("missing column", f"{where} 5", b'{"body": "x"}'),
        ("lone surrogate", f"{where} 6", b"a lone \xed\xa0\x80"),
    ]
    with pytest.raises(DataError, match="^the store is gone"):
        read("my_lab_rows:stops")


def test_small_files_share_a_job_and_a_limit_makes_one_of_all(folder):
    def jobs(**options):
        source = Source(path=str(folder), **options)
        return [[os.path.basename(piece.path) for piece in job] for job in jobs_of(source, "k", 9)]

    # of 4, 5, 9, 13 and 7 bytes
    assert jobs() == [["a.md", "b.txt"], ["c.txt"], ["d.jsonl"], ["d.jsonl"], ["sub.txt"]]
    assert jobs(max_documents=3) == [["a.md", "b.txt", "c.txt", "d.jsonl", "d.jsonl", "sub.txt"]]


def test_a_file_that_is_not_what_its_name_says_is_one_bad_row(tmp_path, bad):
    (tmp_path / "a.jsonl").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "b.txt").write_text("<!DOCTYPE html>\n<html><body>Sign in</body></html>")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "c.txt").write_text(pointer)
    for name, text_documents in (("a.jsonl", "file"), ("c.txt", "file"), ("c.txt", "line")):
        found = bad(tmp_path / name, text_documents=text_documents)
        assert found.loses_file and found.where == str(tmp_path / name)
        assert found.reason == {"a": "wrong suffix", "c": "pointer of Git LFS"}[name[0]]


def test_a_file_that_the_system_does_not_read_is_an_error_with_its_reason(tmp_path, monkeypatch):
    problem = PermissionError(13, "Permission denied", str(tmp_path / "a.txt"))
    error = cannot_read("a.txt", problem, "k")
    assert type(error) is DataError
    assert str(error) == "a.txt: cannot be read (Permission denied). Set `k.path`."
    assert "(odd)" in str(cannot_read("a.txt", ValueError("odd\nmore"), "k"))
    hub = cannot_read(f"hf://datasets/a/b@{'0' * 40}/c.txt", OSError(28, "No space"), "k")
    assert type(hub) is ResourceError and "HF_HOME" in str(hub)

    def refuse(path):
        raise problem

    monkeypatch.setattr("cpt.data.readers.sources.matches_of", refuse)
    with pytest.raises(DataError, match=f"{tmp_path}/a.txt: cannot be read .Permission denied"):
        files_of(Source(path=str(tmp_path / "[a].txt")), "k")


@pytest.mark.parametrize("path", ["memory://nowhere/a.jsonl", "memory://nowhere/*.jsonl"])
def test_a_url_without_files_is_refused(path):
    with pytest.raises(DataError, match=r"no such file. Set `k.path`"):
        files_of(Source(path=path), "k")


def test_hidden_files_behind_a_url_are_no_documents():
    memory = fsspec.filesystem("memory")
    for name in ("a.txt", ".b.txt", ".c/d.txt", "e/f.txt"):
        memory.pipe(f"/hidden/{name}", b"text")
    names = [file.name for file in files_of(Source(path="memory://hidden"), "k")]
    assert names == ["memory:///hidden/a.txt", "memory:///hidden/e/f.txt"]


@pytest.mark.parametrize(
    ("problem", "kind", "named"),
    [
        (
            ImportError("Install s3fs to access S3"),
            ResourceError,
            "Install s3fs to access S3. Inst",
        ),
        (OSError(5, "Input/output error"), DataError, "cannot be read .Input/output error"),
        (ValueError("Protocol not known: x"), DataError, "cannot be read .Protocol not known: x"),
    ],
)
def test_a_file_system_that_cannot_be_opened_is_named(monkeypatch, problem, kind, named):
    def fail(path):
        raise problem

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(kind, match=f"^s3://bucket/a.jsonl: {named}.*`k.path`"):
        files_of(Source(path="s3://bucket/a.jsonl"), "k")


# Pieces of files


def test_files_are_cut_where_a_part_can_be_read_alone():
    names = [
        "s3://bucket/a.jsonl",
        "hf://datasets/owner/name@main/a.parquet",
        "a.csv",
        "a.json",
        "a.jsonl.gz",
        "a.txt",
    ]
    assert [name for name in names if can_be_cut(name, Source(path=name))] == names[:2]


def read_all(source, piece_bytes):
    """Each item as its text or reason, with its place; and how many pieces there were."""
    pieces = pieces_of(source, "k", piece_bytes)
    items = [item for piece in pieces for item in read_piece(source, piece, "k")]
    found = [
        item.text if isinstance(item, Document) else (item.reason, item.byte) for item in items
    ]
    return list(zip(found, [item.where for item in items], strict=True)), len(pieces)


SPECIAL = [
    '{"text": "twö 🎉"}',
    "",
    "   ",
    "\ufeff\u2028x",
    "bad",
    '{"text": "a\\u2028b"}',
    '{"text": "x\u2028y"}',
]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30)
LINE = st.sampled_from(SPECIAL) | TEXT.map(
    lambda text: json.dumps({"text": text}, ensure_ascii=False)
)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@given(
    st.lists(LINE, max_size=40),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 200),
)
@settings(max_examples=40)
def test_pieces_of_lines_give_what_the_whole_file_gives(
    tmp_path_factory, kind, lines, end, bom, last, piece_bytes
):
    path = tmp_path_factory.mktemp("pieces") / f"a.{kind}"
    path.write_bytes(
        b"\xef\xbb\xbf" * bom + end.join([*lines, '{"text": "last"}' + end * last]).encode()
    )
    source = Source(path=str(path), text_documents="line")
    whole, _ = read_all(source, 10**9)
    parts, num_pieces = read_all(source, piece_bytes)
    assert parts == whole and num_pieces == -(-path.stat().st_size // piece_bytes)
    by_hand = [
        line
        for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        if line.strip()
    ]
    assert len(whole) == len(by_hand)


def write_table(path, rows, group):
    table = pa.table({"text": [f"text {row}" if row % 7 else None for row in range(rows)]})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=group)
        return
    new = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=group)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 30))
@settings(max_examples=20)
def test_pieces_of_tables_give_what_the_whole_file_gives(
    tmp_path_factory, name, rows, group, num_cuts
):
    path = tmp_path_factory.mktemp("pieces") / name
    write_table(path, rows, group)
    source, piece_bytes = Source(path=str(path)), path.stat().st_size // num_cuts
    parts, num_pieces = read_all(source, piece_bytes)
    assert parts == read_all(source, 10**9)[0]
    assert num_pieces == (1 if path.suffix == ".arrow" else -(-path.stat().st_size // piece_bytes))
    assert [where for _, where in parts] == [f"{path}: row {row}" for row in range(1, rows + 1)]
