"""KTO: each answer is held against that of the row before, and good answers become likelier."""

from example_runs import build_run, example_rows


def test_the_kl_term_is_taken_with_the_answer_of_the_row_before(tmp_path):
    trainer = build_run("kto", tmp_path)
    rows = example_rows("kto")[:3]
    batch = trainer.collate_examples()(rows)
    first = rows[0]["prompt_ids"] + rows[-1]["completion_ids"]
    assert batch["KL_input_ids"][0, : len(first)].tolist() == first


def test_good_answers_become_likelier_than_bad_ones(tmp_path):
    trainer = build_run("kto", tmp_path, steps=12, held_out=4)
    trainer.train()
    margins = [
        line["eval_pairs_rewards/margins"]
        for line in trainer.state.log_history
        if "eval_pairs_rewards/margins" in line
    ]
    assert abs(margins[0]) < 1e-5 and margins[-1] > 0.1
