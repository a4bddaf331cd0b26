from dataclasses import replace

from cpt.report.sources import files, sources
from cpt.runs.page import Listing, Table


def test_each_source_has_its_row_with_its_licence(record):
    table = sources(record).parts[0]
    assert table.rows[0] == ("code", "90", "600", "75.0 %", "2.00 times", "10", "3", "MIT", "1")
    assert table.rows[1][-2] == "CC0"


def test_what_was_left_out_and_what_was_found_of_the_evaluation_are_told(record):
    _, dropped, told, counts, hits = sources(record).parts
    assert dropped == Listing(["code: 3 documents left out, short."])
    assert told.startswith("Contamination: 2 of 150 training documents") and told.endswith(
        "7 more share a phrase with one."
    )
    assert counts == Table(("source", "evaluation set", "documents"), [("code", "prose", "2")])
    assert hits.lines == ["code.jsonl:3 (code) holds 60.0 % of prose, prose.jsonl:1."]


def test_the_files_are_listed_with_their_hashes(record):
    assert files(record).splitlines() == [
        "code  code.jsonl  xxh3 ab",
        "tokenizer  base/final  xxh3 cd",
        "weights  model.safetensors  sha256 ef",
    ]


def test_without_inputs_and_verdict_there_is_no_section(lone_record):
    assert sources(lone_record).parts == [] and files(lone_record) == ""


def test_facts_of_no_known_form_are_survived(record):
    odd = replace(
        record,
        inputs={"data": {"sources": {"code": 3, "prose": {"tokens": "many", "dropped": [1], "files": 3}}}},
        verdict={},
    )
    assert [row[0] for row in sources(odd).parts[0].rows] == ["code", "prose"]
