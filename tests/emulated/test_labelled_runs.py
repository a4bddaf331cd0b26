"""Real runs on a labelled GPU: one device per operation, no race, and the host's waits as documented."""

import pytest
import torch
from emulated_gpu import CUDA
from labelled_devices import device_of
from labelled_runs import ENGINES, OPTIMIZERS, of_engine, of_optimizer, on_page, row, run_labelled, tiny_sections

from cpt.optim import adamw
from cpt.runs.folder import read_metrics

pytestmark = pytest.mark.heavy
QUICK = ("one process", "DDP", "ZeRO-2, optimizer on the host", "ZeRO-3, optimizer and weights on the host")
ALSO = [pytest.param(name, marks=pytest.mark.slow) for name in ENGINES if name not in QUICK]


@pytest.fixture
def labelled(tmp_path, corpus, tokenizer_folder):
    """Train the tiny recipe with changed sections on a labelled GPU."""

    def run(*, in_group=False, watch=None, **changes):
        sections = tiny_sections(tmp_path, corpus, tokenizer_folder, **changes)
        return run_labelled(sections, tmp_path, in_group=in_group, watch=watch)

    return run


@pytest.mark.parametrize("engine", [*QUICK, *ALSO])
def test_each_engine_trains_on_one_device_and_waits_as_documented(labelled, engine):
    run = labelled(in_group=engine == "DDP", **of_engine(engine))
    assert {device_of(weight) for weight in run.trainer.model.parameters()} <= {CUDA, torch.device("cpu")}
    assert row(engine, run) in on_page()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_waits_as_documented(labelled, optimizer):
    run = labelled(**of_optimizer(optimizer))
    assert row(f"one process, {optimizer}", run) in on_page()


@pytest.mark.parametrize("engine", ["one process", "DDP", "FSDP2"])
def test_the_page_says_that_these_engines_never_wait(engine):
    assert f"| {engine} | 0 | 0 |" in on_page()


def test_gradients_released_into_paged_states_with_an_evaluation_and_background_saves(labelled, monkeypatch, corpus):
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 1000)
    monkeypatch.setattr(adamw, "BUFFER", 2**16)  # the embedding needs several pieces
    run = labelled(
        optimizer={"name": "paged_adamw_8bit", "release_gradients": True},
        model={"dtype": "bfloat16"},
        training={"max_grad_norm": 0},
        budget={"tokens": 5 * 128, "global_batch_tokens": 128},
        evaluation={"perplexity": [{"name": "held", "path": str(corpus / "held_out.jsonl")}], "every_steps": 2},
        checkpoints={"every_steps": 2, "in_background": True},
    )
    assert run.trainer.optimizer.optimizer.pages.fetched > 20
    assert read_metrics(run.trainer.run_folder, ["eval_held_loss"]).last("eval_held_loss") < 6


def test_a_background_save_copies_after_the_update(labelled):
    """Without an evaluation, which would wait for the update before."""
    run = labelled(model={"dtype": "bfloat16"}, checkpoints={"every_steps": 2, "in_background": True})
    assert (run.trainer.run_folder / "checkpoint-2").is_dir()
