import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpt.data.rows.build import build_data
from cpt.data.rows.packing import PACKINGS
from cpt.recipe.schema import Data

PAD = 257
FIXTURES_ARE_READ_ONLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@pytest.fixture
def rows_of(tokenizer, source, tmp_path):
    def build(texts, sequence_length=16, packing="best_fit"):
        stride = 6 if packing == "sliding_window" else None
        data = Data(sources=[source("a", texts)], sequence_length=sequence_length, packing=packing, stride=stride)
        return build_data(data, tokenizer, seed=1, cache_dir=tmp_path / "cache").windowed[0].window(0)

    return build


def pieces(row):
    """The documents and pieces of documents of a row, the padding among them."""
    begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
    return [row["input_ids"][a:b].tolist() for a, b in zip(begins, [*begins[1:], None], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [name for name in PACKINGS if name != "token_budget"])
@pytest.mark.parametrize("epoch", [0, 3])
@FIXTURES_ARE_READ_ONLY
@given(texts=st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=20))
def test_labels_are_the_ids_but_for_first_tokens_and_padding(rows_of, packing, epoch, texts):
    rows = rows_of(texts, packing=packing)
    for row in (rows.row(number, epoch) for number in range(len(rows))):
        unlabelled = (row["position_ids"] == 0) | (row["input_ids"] == PAD)
        assert (row["labels"][unlabelled] == -100).all()
        after_an_end = (row["input_ids"] == 256).roll(1)[1:]
        assert (row["position_ids"][1:][after_an_end] == 0).all(), "a new document begins after each end"
        assert torch.equal(row["labels"][~unlabelled], row["input_ids"][~unlabelled])


@pytest.mark.parametrize("epoch", [0, 3])
@FIXTURES_ARE_READ_ONLY
@given(texts=st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=20))
def test_a_row_of_a_token_budget_holds_each_piece_in_a_line(rows_of, tokenizer, epoch, texts):
    found = []
    rows = rows_of(texts, packing="token_budget")
    for row in (rows.row(number, epoch) for number in range(len(rows))):
        assert row["input_ids"].numel() <= 16 and len({values.shape for values in row.values()}) == 1
        for ids, labels, positions, mask in zip(
            *(row[key] for key in ("input_ids", "labels", "position_ids", "attention_mask")), strict=True
        ):
            length = int(mask.sum())
            assert mask[:length].all() and positions.tolist() == list(range(len(ids))) and (ids[length:] == PAD).all()
            assert (
                labels[0] == -100 and torch.equal(labels[1:length], ids[1:length]) and (labels[length:] == -100).all()
            )
            found.append(ids[:length].tolist())
    expected = [
        ids[at : at + 16]
        for text in texts
        for ids in [tokenizer(text)["input_ids"] + [256]]
        for at in range(0, len(ids), 16)
    ]
    assert sorted(found) == sorted(expected)
