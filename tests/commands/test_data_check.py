import json


def test_check_reads_all_rows_and_ends_with_2_where_a_run_would_stop(run, tmp_path):
    code, said = run("check", {}, "--output", str(tmp_path / "found.jsonl"))
    assert code == 2 and "DataError" in said and "2 bad row(s)" in said and "1 mistake(s)" in said
    assert (
        f"{tmp_path}/bad.jsonl:4: not valid JSON" in said
        and "(byte 49)" in said
        and "null: 1, not valid JSON: 1" in said
    )
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["where"].rpartition(":")[2] for row in rows] == ["2", "4"]


def test_check_tells_every_mistake_at_once(run, tmp_path):
    code, said = run(
        "check", {"sources": [{"path": "missing.jsonl"}, {"path": str(tmp_path / "no/*.txt"), "name": "x"}]}
    )
    assert code == 2 and "missing.jsonl: no such file" in said and "*.txt: no such file" in said
    assert "2 mistake(s)" in said


def test_check_reads_documents_without_a_recipe(cpt_data, tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/a.txt").write_text("Text.")
    cpt_data("ingest", tmp_path / "library", "--output", tmp_path / "corpus")
    for documents in (tmp_path / "corpus", tmp_path / "corpus/documents-00000.jsonl"):
        code, said = cpt_data("check", documents)
        assert code == 0 and "a run can read all of it" in said
    (tmp_path / "corpus/bad.jsonl").write_text('{"text": null}')
    assert cpt_data("check", tmp_path / "corpus")[0] == 2
    assert cpt_data("check", tmp_path / "corpus", "data.on_bad_row=skip")[0] == 2
