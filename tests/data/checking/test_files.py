import subprocess
import sys

from cpt.data.rows.open_sources import check_sources
from cpt.recipe.schema import Component, Data, Evaluation, Source


def complaints(*sources, **options):
    return check_sources(Data(sources=list(sources), **options), Evaluation())


def test_every_complaint_comes_at_once(source, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    found = complaints(
        Source(path="missing.jsonl"),
        Source(path=str(tmp_path / "empty.jsonl")),
        source("a", ["text"], text_column="body"),
        source("b", ["text"], filters=[Component(name="lenght")]),
    )
    expected = [
        "missing.jsonl: no such file",
        "empty.jsonl: no rows",
        "a.jsonl:1: no column `body`. It has: text. Byte 0 of the file. Set `data.sources[2].text_column`",
        "no filter called `lenght`",
    ]
    assert len(found) == 4 and all(part in complaint for part, complaint in zip(expected, found, strict=True))


def test_the_check_needs_no_heavy_library():
    code = "import sys, cpt.data.rows.open_sources; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
