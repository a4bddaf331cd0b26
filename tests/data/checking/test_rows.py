import json

from cpt.commands import data_check as check_rows
from cpt.commands.data_check import read_source
from cpt.recipe.schema import Source


def write(folder, count=1000):
    for name in ("a", "b"):
        rows = [json.dumps({"text": f"{name} {number}" if number % 10 else ""}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text(
            "\n".join([*rows, json.dumps({"text": "long" * 99}), "bad", "{}"]) + "\n"
        )


def test_processes_and_pieces_change_nothing(tmp_path, monkeypatch):
    write(tmp_path)
    source = Source(path=str(tmp_path))
    alone = read_source(source, "k")
    monkeypatch.setattr(check_rows, "PIECE_BYTES", 5000)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert read_source(source, "k") == alone
