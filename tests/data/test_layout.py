import numpy as np
import pytest

from cpt.data.examples.rows import ExampleRows
from cpt.data.layout import Layout
from cpt.data.packing import open_packing
from cpt.data.rows import PackedRows, PaddedRows


def test_what_decides_rows_of_documents_is_what_it_was():
    layout = Layout(16, "best_fit", None, 0)
    assert layout.content() == {"sequence_length": 16, "packing": "best_fit", "stride": None, "pad": 0}
    assert Layout(16, "best_fit", None, 0, "preference").content()["form"] == "preference"


def test_examples_that_are_rows_are_never_cut(tmp_path):
    layout = Layout(4, "best_fit", None, 0, "preference")
    assert layout.is_one_a_row and not Layout(4, "best_fit", None, 0, "conversation").is_one_a_row
    layout.packer(np.array([0, 9]), np.array([9, 2]), 1)(tmp_path)
    packing = open_packing(tmp_path)
    assert sorted(packing.pieces(row, 0)[1].tolist() for row in range(packing.num_rows)) == [[2], [9]]


@pytest.mark.parametrize(
    ("packing", "form", "kind"),
    [
        ("best_fit", "conversation", PackedRows),
        ("token_budget", "conversation", PaddedRows),
        ("best_fit", "document", PackedRows),
        ("none", "judged", ExampleRows),
    ],
)
def test_the_kind_of_rows(tmp_path, packing, form, kind):
    layout = Layout(16, packing, None, 0, form)
    layout.packer(np.array([0]), np.array([3]), 1)(tmp_path)
    assert type(layout.open(None, tmp_path)) is kind
