import json

from cpt.data.checking import rows as check_rows
from cpt.data.checking.rows import count_source, reasons
from cpt.recipe.schema import Source


def write(folder, count=1000):
    for name in ("a", "b"):
        rows = [json.dumps({"text": f"{name} {number}" if number % 10 else ""}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text(
            "\n".join([*rows, json.dumps({"text": "long" * 99}), "bad", "{}"]) + "\n"
        )


def test_each_file_is_counted_to_its_last_row(tmp_path):
    write(tmp_path)
    a, b = count_source(Source(path=str(tmp_path)), "k")
    assert (a.path, a.documents, a.empty, a.num_bad) == (str(tmp_path / "a.jsonl"), 1001, 100, 2)
    assert a.longest == (f"{tmp_path}/a.jsonl:1001", 396) and b.num_characters == a.num_characters
    assert reasons(a.bad) == "not valid JSON: 1, missing column: 1"


def test_processes_and_pieces_change_nothing(tmp_path, monkeypatch):
    write(tmp_path)
    source = Source(path=str(tmp_path))
    alone = list(count_source(source, "k"))
    monkeypatch.setattr(check_rows, "PIECE_BYTES", 5000)
    monkeypatch.setattr(check_rows, "POOL_BYTES", 0)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert list(count_source(source, "k")) == alone


def test_no_more_is_counted_than_the_source_takes(tmp_path, monkeypatch):
    write(tmp_path)
    (a,) = count_source(Source(path=str(tmp_path), max_documents=7), "k")
    assert (a.documents, a.num_bad) == (7, 0)
    monkeypatch.setattr(check_rows, "PIECE_BYTES", 5000)
    a, b = count_source(Source(path=str(tmp_path), max_documents=1500), "k")
    assert (a.documents, a.num_bad, b.documents, b.num_bad) == (1001, 2, 499, 0)
