import pytest
import torch
from tiny_faults import trainer_of

from cpt.data.rows.rows import IGNORED
from cpt.rehearsal.full_rows import FullRows, real_tokens


def row(ids, padding=0):
    labels = torch.tensor([IGNORED, *ids[1:], *[IGNORED] * padding])
    return {
        "input_ids": torch.tensor([*ids, *[0] * padding]),
        "labels": labels,
        "position_ids": torch.arange(len(ids) + padding),
    }


def test_padding_is_no_token():
    assert real_tokens(row([5, 6, 7], padding=3)).tolist() == [5, 6, 7]


def test_a_full_row_holds_the_tokens_of_the_rows_that_follow():
    full = FullRows([row([1, 2, 3], padding=5), row([4, 5], padding=6), row([6, 7, 8, 9])], 8, rows_at_once=1)
    assert full[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert full[0]["labels"].tolist() == [IGNORED, 2, 3, 4, 5, 6, 7, 8]


def test_micro_batches_of_one_document_a_row_and_of_two_take_turns():
    full = FullRows([row(list(range(8)))] * 9, 8, rows_at_once=2)
    begins = [(full[number]["position_ids"] == 0).nonzero().flatten().tolist() for number in range(6)]
    assert begins == [[0], [0], [0, 4], [0, 4], [0], [0]]
    assert full[2]["labels"][4] == IGNORED


@pytest.mark.parametrize("packing", ["best_fit", "none", "token_budget"])
def test_rows_of_a_real_corpus_become_full_whatever_their_packing(tiny_recipe, tmp_path, packing):
    training = {"per_device_train_batch_size": 1}
    trainer = trainer_of(tiny_recipe, tmp_path, data={**tiny_recipe["data"], "packing": packing}, training=training)
    full = FullRows(trainer.rows, 64, rows_at_once=1)
    for number in range(4):
        one, shape = full[number], full[number]["input_ids"].shape
        assert shape.numel() == 64 and {name: values.shape for name, values in one.items()} == dict.fromkeys(
            trainer.rows[number], shape
        )
        unlabelled = 1 if number % 2 == 0 or packing == "token_budget" else 2
        assert int((one["labels"] == IGNORED).sum()) == unlabelled
