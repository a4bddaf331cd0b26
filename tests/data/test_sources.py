import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.readers.documents import Document
from cpt.data.readers.sources import open_source, pieces_of, read_piece
from cpt.errors import DataError, ResourceError
from cpt.recipe.schema import Source


def texts(path, **options):
    return [document.text for document in open_source(Source(path=str(path), **options), "data.sources[0]")]


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "b.txt": "B",
        "a.md": "A",
        "sub/c.txt": "C",
        "sub/x.py": "no",
        ".git/d.txt": "no",
        "sub/.e.txt": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sub/d.jsonl").write_text(json.dumps({"text": "D"}))
    return tmp_path


@pytest.mark.parametrize(
    "path, message",
    [
        ("missing.jsonl", "no such file or folder"),
        ("./missing", "no such file or folder"),
        ("corpus", "no such file or folder.*a dataset on the Hub is written `owner/name`"),
        ("nothing/*.jsonl", "no such file or folder"),
        ("sub/*.py", r"x.py: cannot read a `.py` file"),
    ],
)
def test_what_is_not_there_is_said_with_the_key(folder, monkeypatch, path, message):
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message) as error:
        texts(path)
    assert "`data.sources[0].path`" in str(error.value)


def test_a_hub_dataset_without_the_hub_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ResourceError, match=r"owner/name: no such local path, and the Hub cannot be reached.*data.sources\[0\].path"
    ):
        texts("owner/name")


LINES = st.lists(
    st.sampled_from(
        [
            '{"text": "one"}',
            '{"text": "twö 🎉"}',
            "",
            "   ",
            "\ufeff\u2028x",
            "bad",
            '{"text": ""}',
            '{"text": "a\\u2028b"}',
            '{"text": "x\u2028y"}',
        ]
    )
    | st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30).map(
        lambda text: json.dumps({"text": text}, ensure_ascii=False)
    ),
    max_size=40,
)


def read_all(source, piece_bytes):
    """Each item as its text or reason, with its place; and how many pieces there were."""
    pieces = pieces_of(source, "k", piece_bytes)
    items = [item for piece in pieces for item in read_piece(source, piece, "k")]
    return [
        (item.text if isinstance(item, Document) else (item.reason, item.byte), item.where) for item in items
    ], len(pieces)


@given(
    LINES,
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 200),
    st.sampled_from(["jsonl", "txt"]),
)
@settings(max_examples=150)
def test_pieces_of_lines_give_what_the_whole_file_gives(
    tmp_path_factory, lines, end, bom, last_end, piece_bytes, kind
):
    path = tmp_path_factory.mktemp("pieces") / f"a.{kind}"
    path.write_bytes(b"\xef\xbb\xbf" * bom + end.join([*lines, '{"text": "last"}' + end * last_end]).encode())
    source = Source(path=str(path), text_documents="line")
    whole, _ = read_all(source, 10**9)
    parts, num_pieces = read_all(source, piece_bytes)
    assert parts == whole and num_pieces == -(-path.stat().st_size // piece_bytes)
    by_hand = [line for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
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
@settings(max_examples=40)
def test_pieces_of_tables_give_what_the_whole_file_gives(tmp_path_factory, name, rows, group, num_cuts):
    path = tmp_path_factory.mktemp("pieces") / name
    write_table(path, rows, group)
    source, piece_bytes = Source(path=str(path)), path.stat().st_size // num_cuts
    parts, num_pieces = read_all(source, piece_bytes)
    assert parts == read_all(source, 10**9)[0]
    assert num_pieces == (1 if path.suffix == ".arrow" else -(-path.stat().st_size // piece_bytes))
    assert [where for _, where in parts] == [f"{path}: row {row}" for row in range(1, rows + 1)]
