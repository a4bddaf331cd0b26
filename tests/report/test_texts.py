from dataclasses import replace

from cpt.report.texts import LONGEST, kept, not_run, samples, use


def test_samples_stand_before_and_after_with_their_prompt(record):
    table = samples(record).parts[0]
    assert table.has_texts and table.rows == [["def ", "the", "main():\n    pass"]]


def test_without_a_verdict_the_first_and_the_last_continuation_are_taken(record):
    unjudged = replace(record, verdict={})
    assert samples(unjudged).parts[0].rows == [["def ", "the", "main():\n    pass"]]
    assert samples(replace(unjudged, samples=record.samples[:1])).parts[0].rows == [["def ", "the", "(not yet)"]]


def test_a_long_sample_is_cut_and_an_empty_one_is_said_to_be(record):
    long = replace(record, verdict={"samples": [{"prompt": "p", "before": "", "after": "x" * 5000}]})
    row = samples(long).parts[0].rows[0]
    assert row[1] == "(nothing)" and len(row[2]) < LONGEST + 50 and row[2].endswith("(3,800 more characters)")


def test_what_was_not_run_is_a_list(record):
    assert not_run(record).parts[0].lines == ["benchmarks: not asked for."]


def test_the_command_that_serves_the_model_is_the_verdicts(record):
    assert use(record).parts[0].text == "cpt serve runs/code/final"


def test_without_a_verdict_the_model_is_served_from_where_it_lies(record):
    assert use(replace(record, verdict={})).parts[0].text == f"cpt serve {record.folder / 'final'}"


def test_a_run_without_a_model_serves_nothing(lone_record):
    assert use(lone_record).parts == []


def test_the_profilers_table_is_folded_too(record):
    (record.folder / "profile").mkdir()
    (record.folder / "profile" / "steps-50-52.txt").write_text("aten::mm 40 %")
    assert "steps-50-52.txt\naten::mm 40 %" in kept(record).parts[-1].text


def test_recipe_versions_hashes_and_changes_are_folded(record):
    titles = [part.title for part in kept(record).parts]
    assert titles == [
        "The resolved recipe",
        "Versions of all packages",
        "Hashes of data, tokenizer and weights",
        "Variables of the environment that can change figures",
        "Uncommitted changes of the code",
    ]
    assert "peft" not in kept(record).parts[1].text and "+new" in kept(record).parts[-1].text
