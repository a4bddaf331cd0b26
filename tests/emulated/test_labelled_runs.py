"""Real runs on a labelled GPU: one device per operation, no race, and the host's waits as documented."""

from functools import partial

import pytest
from labelled_runs import ENGINES, OPTIMIZERS, of_engine, of_optimizer, on_page, row_of, run_labelled, tiny_sections

from cpt.optim import adamw
from cpt.runs.folder import read_metrics

pytestmark = pytest.mark.heavy
QUICK = ("one process", "DDP", "ZeRO-2, optimizer on the host", "ZeRO-3, optimizer and weights on the host")
ALSO = [pytest.param(name, marks=pytest.mark.slow) for name in ENGINES if name not in QUICK]


@pytest.fixture
def sections(tmp_path, corpus, tokenizer_folder):
    return partial(tiny_sections, tmp_path, corpus, tokenizer_folder)


@pytest.mark.parametrize("engine", [*QUICK, *ALSO])
def test_each_engine_trains_on_one_device_and_waits_as_documented(sections, tmp_path, engine):
    assert row_of(engine, sections(**of_engine(engine)), tmp_path) in on_page()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_waits_as_documented(sections, tmp_path, optimizer):
    assert row_of(f"one process, {optimizer}", sections(**of_optimizer(optimizer)), tmp_path) in on_page()


@pytest.mark.parametrize("engine", ["one process", "DDP", "FSDP2"])
def test_the_page_says_that_these_engines_never_wait(engine):
    assert f"| {engine} | 0 | 0 |" in on_page()


def test_gradients_released_into_paged_states_with_an_evaluation_and_background_saves(
    sections, tmp_path, monkeypatch, corpus
):
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 1000)
    monkeypatch.setattr(adamw, "BUFFER", 2**16)  # the embedding needs several pieces
    changed = sections(
        optimizer={"name": "paged_adamw_8bit", "release_gradients": True},
        model={"dtype": "bfloat16"},
        training={"max_grad_norm": 0},
        budget={"tokens": 5 * 128, "global_batch_tokens": 128},
        evaluation={"perplexity": [{"name": "held", "path": str(corpus / "held_out.jsonl")}], "every_steps": 2},
        checkpoints={"every_steps": 2, "in_background": True},
    )
    run = run_labelled(changed, tmp_path)
    assert run.trainer.optimizer.optimizer.pages.fetched > 20
    assert read_metrics(run.trainer.run_folder, ["eval_held_loss"]).last("eval_held_loss") < 6


def test_a_background_save_copies_after_the_update(sections, tmp_path):
    """Without an evaluation, which would wait for the update before."""
    changed = sections(model={"dtype": "bfloat16"}, checkpoints={"every_steps": 2, "in_background": True})
    run = run_labelled(changed, tmp_path)
    assert (run.trainer.run_folder / "checkpoint-2").is_dir()
