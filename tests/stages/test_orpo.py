"""ORPO: starts, learns and is evaluated on our rows."""

from example_runs import build_run


def test_the_better_answers_become_likelier(tmp_path):
    trainer = build_run("orpo", tmp_path, steps=12, held_out=4)
    trainer.train()
    margins = [
        line["eval_pairs_rewards/margins"]
        for line in trainer.state.log_history
        if "eval_pairs_rewards/margins" in line
    ]
    assert len(margins) == 2 and margins[-1] > margins[0] + 0.01
