import pytest
from tiny_documents import SENTENCE, write_docx, write_pdf


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "1")
    folder = tmp_path / "library"
    folder.mkdir()
    write_pdf(folder / "a.pdf", [[SENTENCE]])
    write_docx(folder / "b.docx")
    (folder / "c.txt").symlink_to(folder / "b.docx")
    (folder / "d.epub").write_bytes(b"PK\x03\x04 cut off")
    (folder / "e.png").touch()
    return folder


def test_what_was_converted_and_what_was_not_is_shown(cpt_data, library, tmp_path):
    code, said = cpt_data("ingest", library, "--output", tmp_path / "out")
    assert code == 2 and "damaged zip" in said and "d.epub" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("│ ")]
    assert ["all", "4", "2", "1"] in [[row[place] for place in (1, 3, 5, 7)] for row in rows]
    assert "1 other file(s) were skipped (.png: 1)." in said
    assert f"data.sources: [{{path: {tmp_path}/out}}]" in said and "failed.jsonl" in said


def test_nothing_to_convert_is_a_mistake_and_what_a_recipe_reads_by_itself_is_told(cpt_data, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "rows/b.png").write_text("")
    (tmp_path / "rows/c.jsonl.gz").touch()
    code, said = cpt_data("ingest", tmp_path / "rows", "--output", tmp_path / "corpus")
    assert code == 2 and "A recipe reads .jsonl as they are" in said and "There is no document in the output." in said
    assert cpt_data("ingest", tmp_path / "rows", "--output", tmp_path / "corpus", "--on-bad", "skip")[0] == 0
