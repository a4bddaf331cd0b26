import json

import pytest
from tiny import write_recipe

from cpt.cli import main
from cpt.data_commands import excerpt


@pytest.fixture
def run(tiny_recipe, tmp_path, capsys):
    """`run("check", {"on_bad_row": "skip"})`: the exit code and what was printed, on one good and one bad source."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good one"}\n{"text": null}\n{"text": ""}\nnot json\n')

    def command(name, data, *options):
        tiny_recipe["data"]["sources"].append({"path": str(bad)})
        tiny_recipe["data"] |= data
        path = write_recipe(tiny_recipe, tmp_path / "r.yaml")
        try:
            main(["data", name, str(path), *options])
        except SystemExit as ended:
            return ended.code, "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    return command


def test_check_reads_all_rows_and_ends_with_2_where_a_run_would_stop(run, tmp_path):
    code, said = run("check", {}, "--output", str(tmp_path / "found.jsonl"))
    assert code == 2 and "DataError" in said and "2 bad row(s)" in said and "1 mistake(s)" in said
    assert f"{tmp_path}/bad.jsonl:4: not valid JSON" in said and "(byte 49)" in said and "null: 1, not valid JSON: 1" in said
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["where"].rpartition(":")[2] for row in rows] == ["2", "4"]


def test_check_follows_the_policy_and_its_share(run):
    code, said = run("check", {"on_bad_row": "skip", "max_bad_share": 0.5}, "--source", "bad")
    assert code == 0 and "a run can read all of it" in said and "domain" not in said


def test_check_refuses_more_than_the_share(run):
    code, said = run("check", {"on_bad_row": "quarantine", "max_bad_share": 0.4})
    assert code == 2 and "2 of 4 rows are bad (50.00%)" in said


def test_check_tells_every_mistake_at_once(run, tmp_path):
    code, said = run("check", {"sources": [{"path": "missing.jsonl"}, {"path": str(tmp_path / "no/*.txt"), "name": "x"}]})
    assert code == 2 and "missing.jsonl: no such file" in said and "no file matches" in said and "2 mistake(s)" in said


def test_preview_shows_kept_and_dropped_documents_and_packed_rows(run, tmp_path):
    code, said = run("preview", {"filters": [{"name": "length", "min_characters": 100}]}, "--rows", "4")
    assert code == 0
    lines = [line for line in said.splitlines() if "bad row: null" in line or "dropped: shorter" in line or "dropped: empty" in line]
    assert len(lines) == 5 and any("bad.jsonl:2" in line for line in lines)
    assert "row 0: " in said and "of 64 tokens" in said and " | " in said


def test_preview_of_one_source_needs_its_name(run):
    code, said = run("preview", {}, "--source", "domian")
    assert code == 2 and "Did you mean `domain`" in said


def test_an_excerpt_is_one_line_of_beginning_and_end():
    assert excerpt("a\n b") == "a b" and excerpt("x" * 50 + "y" * 50) == "x" * 40 + " ... " + "y" * 20
