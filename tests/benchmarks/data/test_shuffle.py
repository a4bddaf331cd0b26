import numpy as np

from benchmarks.data.corpus import write_texts
from benchmarks.data.shuffle import NUMBERED, numbered_texts, statistics


def test_a_random_order_is_found_random():
    found = statistics(np.random.default_rng(0).permutation(20_000))
    assert 0.98 < found["mean"] < 1.02
    assert 0.85 < found["near"] < 1.15
    assert found["largest_difference"] < 0.02
    assert abs(found["order"]) < 0.03


def test_no_shuffling_at_all_is_found_out():
    found = statistics(np.arange(20_000))
    assert found["mean"] < 0.001
    assert found["near"] > 50
    assert found["largest_difference"] > 0.99
    assert found["order"] > 0.999


def test_documents_tell_their_number(tmp_path):
    write_texts(tmp_path / "c.jsonl", iter(["a" * 7000, "short"]))
    numbers = [NUMBERED.match(text)[1] for text in numbered_texts(tmp_path / "c.jsonl")]
    assert numbers == ["0", "1", "2"]
