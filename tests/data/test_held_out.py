import numpy as np

from cpt.data.held_out import held_out_set
from cpt.data.layout import Layout


def test_a_set_counts_documents_tokens_and_bytes_of_the_chosen(tokenized, source, tmp_path):
    opened = tokenized(source("a", ["öne", "two", "three"]))
    documents = opened.documents([0])
    found = held_out_set("exam", documents, np.array([0, 2]), Layout(16, "best_fit", None, 257), tmp_path / "cache")
    assert (found.name, found.num_documents, found.num_tokens, found.num_bytes, len(found.rows)) == ("exam", 2, 4 + 1 + 6, 4 + 5, 1)


def test_overlapping_windows_are_no_way_to_judge(tokenized, source, tmp_path):
    documents = tokenized(source("a", ["x" * 40])).documents([0])
    found = held_out_set("exam", documents, np.array([0]), Layout(16, "sliding_window", 4, 257), tmp_path / "cache")
    assert found.rows.num_tokens == 43, "two cuts, each with one token of overlap, which is not predicted twice"
