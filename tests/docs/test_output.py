"""What a page shows as printed is found in what is printed, or it is a mistake."""

import pytest
from documented.output import not_printed

PRINTED = """\
Reading ...
loss 0.5321 at step 12, 3,456 tokens/s
\x1b[32mIt worked\x1b[0m: 17.4 % (95 % interval 16.5 to 18.2 %)
┏━━━━┳━━┓
┃ a  ┃ b┃
saved in runs/a
"""


@pytest.mark.parametrize(
    "shown",
    [
        ["loss 0.1 at step 9, 12 tokens/s", "saved in runs/a"],
        ["Reading ...", "...", "saved in ..."],
        ["It worked: 1 % (95 % interval -1 to +2 %)", "", "┏━━━━━━━━┳━━━━┓", "┃ a ┃ b┃"],
        [],
    ],
)
def test_numbers_spaces_and_what_is_left_out_do_not_matter(shown):
    assert not_printed(shown, PRINTED) is None


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (["loss 0.1 at epoch 9, 12 tokens/s"], 0),
        (["loss 0.1 at step 9"], 0),
        (["saved in runs/a", "Reading ..."], 1),
        (["saved in runs/a", "saved in runs/a"], 1),
        (["It failed: ..."], 0),
    ],
)
def test_other_words_another_order_and_lines_that_are_not_there_do(shown, missing):
    assert not_printed(shown, PRINTED) == shown[missing]
