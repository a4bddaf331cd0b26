"""What every trainer of TRL's is given: our rows, our evaluation, and silence."""

import pytest
from example_runs import build_run

from cpt.errors import Interrupted, RecipeError


def test_rows_of_an_evaluation_are_counted_once(tmp_path):
    trainer = build_run("dpo", tmp_path, held_out=7)
    assert [numbers for numbers, _ in trainer.batches_of(7)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert sum(count for _, count in trainer.batches_of(7)) == 7


def test_two_processes_share_whole_batches_and_repeat_the_rest(tmp_path, monkeypatch):
    trainer = build_run("dpo", tmp_path, held_out=4)
    seen = []
    for rank in (0, 1):
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        monkeypatch.setattr(type(trainer.args), "process_index", rank)
        seen.append(list(trainer.batches_of(11)))
    assert seen[0] == [([0, 1, 2, 3], 8), ([8, 9, 10], 3)] and seen[1] == [([4, 5, 6, 7], 8), ([8, 9, 10], 3)]


def test_figures_of_a_set_do_not_depend_on_the_batch_size(tmp_path):
    small, large = (
        build_run("dpo", tmp_path, held_out=7, training={"per_device_eval_batch_size": size}).evaluate()
        for size in (2, 7)
    )
    for name in ("eval_pairs_loss", "eval_pairs_logps/chosen", "eval_pairs_rewards/margins"):
        assert small[name] == pytest.approx(large[name], abs=1e-5)


def test_a_signal_in_an_evaluation_stops_and_saves(tmp_path):
    trainer = build_run("dpo", tmp_path, held_out=4)

    def stop():
        raise Interrupted("a signal")

    trainer.call_prediction_step = stop
    assert trainer.evaluate() == {} and trainer.control.should_save and trainer.control.should_training_stop
    assert trainer.model.training


def test_nobody_is_told_that_a_run_began(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **about: told.append(about))
    build_run("dpo", tmp_path)
    assert told == []


def test_liger_is_refused_with_the_reason(tmp_path):
    with pytest.raises(RecipeError, match="`training.use_liger_kernel`: stage `dpo`"):
        build_run("dpo", tmp_path, training={"use_liger_kernel": True})


def test_an_evaluation_counts_its_examples_and_leaves_out_what_is_of_the_training(tmp_path):
    figures = build_run("dpo", tmp_path, held_out=7).evaluate()
    assert figures["eval_pairs_examples"] == 7 and "eval_pairs_num_tokens" not in figures


def test_a_figure_is_the_mean_of_the_batches_that_have_it(tmp_path):
    whole, apart = (
        build_run("kto", tmp_path, held_out=2, training={"per_device_eval_batch_size": size}).evaluate()
        for size in (2, 1)
    )
    # Of two answers one is wanted and one is not: each batch of one has the likelihood of one kind alone.
    for name in ("eval_pairs_logps/chosen", "eval_pairs_logps/rejected"):
        assert apart[name] == pytest.approx(whole[name], rel=1e-4)
