import numpy as np
import pytest

from cpt.data.examples.encoder import LEARNED
from cpt.data.readers.columns import source_with_form
from cpt.data.rows.held_out import held_out_set
from cpt.data.rows.packing import Layout


def test_overlapping_windows_are_no_way_to_judge(tokenized, source, tmp_path):
    documents = tokenized(source("a", ["x" * 40])).documents([0])
    found = held_out_set("exam", documents, np.array([0]), Layout(16, "sliding_window", 4, 257), tmp_path / "cache")
    assert found.rows.num_tokens == 43, "two cuts, each with one token of overlap, which is not predicted twice"


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"


@pytest.mark.parametrize("packing", ["best_fit", "none", "token_budget"])
def test_conversations_and_texts_beside_them_are_judged_to_their_ends(
    talking, tokenized, rows_file, tmp_path, packing
):
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "b" * 50}]
    rows = rows_file("talks", [{"messages": said}, {"text": "c" * 40}, {"text": "d"}])
    documents = tokenized(source_with_form(rows, "conversation", "data.sources[0]"), by=talking(CHATML)).documents([0])
    layout = Layout(16, packing, None, 257, "conversation")
    found = held_out_set("exam", documents, np.arange(3), layout, tmp_path / "cache")
    of_documents = [
        documents.segments(start, end - start)
        for start, end in zip(documents.offsets, documents.offsets[1:], strict=False)
    ]
    learned = sum(int((segments[1:] == LEARNED).sum()) for segments in of_documents)
    assert sum(int((row["labels"] != -100).sum()) for row in found.rows) == learned == 50 + 2 + 40 + 1
    assert (found.num_documents, documents.num_bytes[found.chosen].sum()) == (3, 50 + 40 + 1), (
        "bytes of the answers and texts, of which all is read"
    )
