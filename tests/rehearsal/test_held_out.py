import numpy as np
from tiny import write_documents
from tiny_faults import trainer_of

from cpt.rehearsal.held_out import FEWEST_DOCUMENTS, shortened_set


def held_out_of(sections, folder, documents):
    write_documents(folder / "judged.jsonl", documents, seed=9)
    evaluation = {"perplexity": [{"path": str(folder / "judged.jsonl"), "name": "judged"}]}
    return trainer_of(sections, folder / "run", evaluation=evaluation).held_out["judged"]


def lengths(held_out):
    return np.diff(held_out.rows.documents.offsets)[held_out.chosen]


def test_of_a_large_set_the_longest_documents_are_measured(tiny_recipe, tmp_path):
    whole = held_out_of(tiny_recipe, tmp_path, 200)
    short = shortened_set(whole, "best_fit", rows_at_once=2)
    assert FEWEST_DOCUMENTS <= short.num_documents < whole.num_documents
    assert sorted(lengths(short)) == sorted(lengths(whole))[-short.num_documents :]


def test_a_small_set_is_measured_whole(tiny_recipe, tmp_path):
    whole = held_out_of(tiny_recipe, tmp_path, 40)
    assert shortened_set(whole, "best_fit", rows_at_once=100) is whole
