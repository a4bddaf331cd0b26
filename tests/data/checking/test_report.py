import pytest

from cpt.data.build import build_data
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut


@pytest.fixture
def report(tokenizer, source, tmp_path):
    def run(texts, evaluation=None, **data):
        recipe = Data(sources=[source("corpus", texts)], sequence_length=16, **data)
        given = evaluation or Evaluation()
        return build_data(recipe, tokenizer, seed=1, evaluation=given, cache_dir=tmp_path / "cache").sources[0]

    return run


def test_a_report_counts_what_became_of_each_document(report, source):
    exam = source("exam", ["seen before"])
    evaluation = Evaluation(perplexity=[HeldOut(path=exam.path)])
    told = report(
        ["abc", "a longer one", "seen before", "", "abc"],
        evaluation,
        deduplicate="exact",
        filters=[Component(name="length", min_characters=2)],
    )
    assert (told.name, told.documents, told.held_out, told.tokens) == ("corpus", 2, 1, 4 + 13)
    assert told.dropped == {"empty": 1, "exact duplicate": 1} and told.lengths == {4: 1, 8: 1} and not told.is_estimate
    assert told.padding == 1 - 17 / (told.rows * 16)


def test_a_giant_document_is_told_with_its_address(report, caplog):
    report([*["short"] * 20, "x" * 900])
    assert "corpus: one of 21 documents" in caplog.text and "corpus.jsonl:21" in caplog.text


def test_a_text_beside_conversations_is_no_giant_for_a_row_holds_its_beginning(tokenizer, source, tmp_path, caplog):
    data = Data(sources=[source("corpus", [*["short"] * 20, "x" * 900])], sequence_length=16)
    told = build_data(data, tokenizer, seed=1, cache_dir=tmp_path / "cache", form="conversation").sources[0]
    assert told.tokens == 20 * 6 + 16 and "one of 21 documents" not in caplog.text
