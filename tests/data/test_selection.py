"""Which documents are trained on and which are held out, by number and by bytes."""

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from cpt.data.rows import held_out as held_out_module
from cpt.data.rows.held_out import check_sizes, nothing_held_out, other_share
from cpt.data.rows.selection import Selection, is_held_out, longest_held_out
from cpt.recipe.schema import Data, Evaluation, HeldOut

TEXTS = ["one", "three", "fifteen", "a", "seventy"]  # and an end token each: 4, 6, 8, 2 and 8


def selection(**options):
    return Selection(
        **{
            "held_out_share": None,
            "evaluated": np.empty(0, np.uint64),
            "repeated": None,
            "max_tokens": None,
            **options,
        }
    )


@pytest.mark.parametrize(
    ("most", "before", "chosen", "size"),
    [
        (None, 9, [0, 2, 3, 4], 0),
        (23, 9, [0, 2, 3], 7),
        (22, 9, [0, 2], 8),
        (14, 0, [0, 2, 3], 7),
        (3, 0, [], 18),
    ],
)
def test_the_first_documents_that_fit_into_max_tokens_are_chosen(
    tokenized, source, most, before, chosen, size
):
    documents = tokenized(source("a", TEXTS)).documents([0])
    evaluated = np.array([xxh3_64_intdigest(b"three")], np.uint64)
    found = selection(max_tokens=most, evaluated=evaluated).choose(documents, [0], before)
    assert found.documents.tolist() == chosen
    assert (found.held_out, found.held_out_bytes) == (1, 5)
    num_after = 4 - len(chosen)
    assert found.left_out == ({"after max_tokens": num_after} if num_after else {})
    assert found.left_out_bytes == ({"after max_tokens": size} if num_after else {})


def test_a_hash_below_the_share_holds_a_document_out_unless_it_is_long():
    hashes = np.array([0, 2**62 - 1, 2**62, 2**64 - 1, 5], np.uint64)
    sizes = np.array([10, 11, 3, 3, 12])
    assert is_held_out(hashes, sizes, 0.25).tolist() == [True, True, False, False, True]
    assert is_held_out(hashes, sizes, 0.25, 11).tolist() == [True, True, False, False, False]
    assert longest_held_out(1000, 100, 0.3) == 60 and longest_held_out(1000, 50, 0.3) == 80
    assert longest_held_out(1009, 100, 0.3) == 60 and longest_held_out(0, 0, 0.3) == 0


def test_a_share_of_the_text_that_differs_by_more_than_a_factor_of_two_is_a_warning():
    assert other_share("a", 0.2, 100, 1000, 5) is None
    assert other_share("a", 0.2, 400, 1000, 5) is None
    few, much = (other_share("a", 0.2, size, 1000, count) for size, count in ((99, 1), (401, 5)))
    assert few.startswith("a: ") and "20.00%" in few and "9.90%" in few and "1 document." in few
    assert "40.10%" in much and "5 documents." in much


@pytest.mark.parametrize(
    ("share", "count", "remedy"),
    [(0.01, 80, "Set it to 0.5,"), (0.05, 500, "Set it to 0.1,"), (0.1, 500, "Add documents,")],
)
def test_a_share_that_selects_nothing_has_a_remedy(share, count, remedy):
    assert f"is {share:g}, which selects none of {count} " in nothing_held_out(share, count)
    assert remedy in nothing_held_out(share, count)


@pytest.mark.parametrize("size", [7, 8])
def test_a_document_of_a_set_may_be_as_long_as_four_average_ones(build, source, size):
    exam = source("exam", [*"abcdefg", "x" * size])
    evaluation = Evaluation(perplexity=[HeldOut(path=exam.path)])
    held_out = build(source("a", ["a text"]), evaluation=evaluation).held_out["exam"]
    assert held_out.num_documents == (8 if size == 7 else 7)
    if size == 7:
        assert held_out.left_out == ""
    else:
        assert "`exam`: 1 of 8 documents" in held_out.left_out and "(53 % " in held_out.left_out


def test_only_sources_that_are_quick_to_read_are_counted(source, monkeypatch):
    small, large = source("a", ["ab", "", "cde"]), source("b", ["x" * 50])
    sources = [source("c", ["y" * 51]), large, small]
    size = len('{"text": ""}\n') + 50
    monkeypatch.setattr(held_out_module, "MOST_BYTES_READ", size)
    accounts, warnings = check_sizes(Data(sources=sources), Evaluation(), few=3)
    assert [(account.name, account.documents) for account in accounts] == [("b", 1), ("a", 2)]
    assert [account.files_read for account in accounts] == [(1, size), (1, 3 * 13 + 5)]
    assert [account.text.read for account in accounts] == [50, 5] and warnings == []
    assert accounts[1].dropped == {"empty": 1} and accounts[1].held_out is None
