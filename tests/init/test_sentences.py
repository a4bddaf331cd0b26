from collections import Counter

import pytest

from cpt.init.choices import Cost
from cpt.init.documents import TokenEstimate
from cpt.init.sentences import in_time, told_cost, told_documents, told_model, told_tokens
from cpt.planner.target import find_target


@pytest.mark.parametrize(("hours", "words"), [(26.34, "26.3 h"), (0.5, "30 min"), (0.01, "36 s"), (0.0, "1 s")])
def test_time_is_told_in_the_unit_that_fits(hours, words):
    assert in_time(hours) == words


def test_the_cost_says_what_it_assumes_and_what_money_it_is():
    told = told_cost(Cost(10, 7, 14, 0.35), find_target("H100", 2, 64.0), 2.5)
    assert (
        "about 10.0 h, 7.0 h to 14.0 h at 35 % of the peak, 50 % to 25 % (assumed, not measured); 50.00 at 2.5 an hour"
        in told
    )
    assert "about 1 s at 35 %" in told_cost(Cost(1e-5, 1e-6, 2e-5, 0.35), find_target("H100", 2, 64.0), None), (
        "no range of 1 s to 1 s"
    )
    assert "an hour" not in told_cost(Cost(10, 7, 14, 0.35), find_target("H100", 2, 64.0), None)


def test_documents_are_told_with_what_is_missing(facts):
    facts.languages, facts.bad_rows, facts.first_bad = Counter({"en": 90, "de": 10}), 2, "a.jsonl:7: not valid JSON"
    told = told_documents(facts)
    for part in (
        "120 in 1 jsonl file,",
        "en 90 %, de 10 %",
        "2 bad rows (the first: a.jsonl:7: not valid JSON)",
        "no licence file",
    ):
        assert part in told
    facts.languages, facts.is_whole, facts.licence_files = None, False, {"LICENSE": "MIT", "COPYING": None}
    told = told_documents(facts)
    assert (
        "about 120" in told
        and "pip install 'cpt[language]'" in told
        and "LICENSE (MIT), COPYING (not recognised)" in told
    )


def test_a_count_is_no_estimate():
    assert told_tokens(TokenEstimate(7, 7, 7, 2, 4, 1)) == "7, counted with the base's tokenizer."
    assert "about 7 under" in told_tokens(TokenEstimate(7, 6, 8, 2, 4, 1))


def test_what_was_published_of_a_base_is_told_with_its_source(base_of):
    told = told_model(base_of("0.5b", "EleutherAI/pythia-410m"))
    assert "peak learning rate 0.0003, batch in tokens 2.09715e+06" not in told
    assert "batch in tokens 2,097,152 (EleutherAI/pythia: README.md, models/*.yml)" in told
    assert "licence not found" in told_model(base_of("0.5b"))
