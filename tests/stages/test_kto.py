"""KTO compares each answer with that of the row before."""

from example_runs import build_run, example_rows


def test_the_kl_term_is_taken_with_the_answer_of_the_row_before(tmp_path):
    trainer = build_run("kto", tmp_path)
    rows = example_rows("kto")[:3]
    batch = trainer.collate_examples()(rows)
    first = rows[0]["prompt_ids"] + rows[-1]["completion_ids"]
    assert batch["KL_input_ids"][0, : len(first)].tolist() == first
