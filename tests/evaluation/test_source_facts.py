import json

from cpt.evaluation.source_facts import SourceFacts, sources_of


def test_what_was_left_out_as_contaminated_is_summed_over_the_sets(tmp_path):
    dropped = {"contaminated: domain": 2, "contaminated: quiz": 1, "length": 9}
    of_source = {"documents": 100, "share": 0.5, "licence": "MIT", "dropped": dropped}
    (tmp_path / "inputs.json").write_text(json.dumps({"data": {"sources": {"code": of_source}}}))
    assert sources_of(tmp_path) == [SourceFacts("code", 100, 0.5, "MIT", 3)]


def test_a_run_without_a_record_has_none(tmp_path):
    assert sources_of(tmp_path) == []
