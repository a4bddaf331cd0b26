import numpy as np

from benchmarks.data.mixture import books, interleaved, up_to


def test_documents_drawn_by_weight_give_long_ones_most_tokens():
    lengths = {"lines": np.full(4000, 10), "files": np.full(400, 100), "books": np.full(4, 10_000)}
    shares = interleaved(lengths, tokens=200_000)
    assert shares["books"] > 0.9
    assert sum(shares.values()) == 1


def test_books_are_files_joined(monkeypatch):
    monkeypatch.setattr("benchmarks.data.mixture.BOOK", 5)
    assert list(books(["abc", "def", "longer", "rest"])) == ["abc\ndef", "longer"]


def test_texts_are_taken_until_there_are_enough_characters():
    assert list(up_to(iter(["abc", "def", "ghi"]), 4)) == ["abc", "def"]
