"""Real runs on a labelled GPU: one device per operation, no race, and the host's waits as documented."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cuda_stand_ins import process_group
from labelled_runs import (
    ENGINES,
    OPTIMIZERS,
    in_children,
    of_engine,
    of_optimizer,
    on_page,
    row_of,
    run_labelled,
    tiny_sections,
    zero,
)
from tiny_checkpoints import save_llama

from cpt.runs.folder import read_metrics

pytestmark = pytest.mark.heavy
QUICK = (
    "one process",
    "DDP",
    "ZeRO-3",
)  # DeepSpeed compiles its optimizer for the host, in minutes
ALSO = [pytest.param(name, marks=pytest.mark.slow) for name in ENGINES if name not in QUICK]


@pytest.fixture
def sections(tmp_path, corpus, tokenizer_folder):
    return partial(tiny_sections, tmp_path, corpus, tokenizer_folder)


@pytest.mark.parametrize("engine", [*QUICK, *ALSO])
def test_each_engine_trains_on_one_device_and_waits_as_documented(sections, tmp_path, engine):
    assert row_of(engine, sections(**of_engine(engine)), tmp_path) in on_page()


class UncompiledAdamW(torch.optim.AdamW):
    """For DeepSpeed's kernel for the host, which compiles for minutes: the slow tests use it."""

    def __init__(self, parameters, *, adamw_mode, **options):
        super().__init__(parameters, **options)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_on_the_host_gets_its_gradients_and_norms_there(
    sections, tmp_path, monkeypatch, stage
):
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", UncompiledAdamW)
    training = zero(stage, optimizer=True)
    training["deepspeed"]["zero_force_ds_cpu_optimizer"] = False
    on_host = sections(training=training, model={"dtype": "auto"})
    assert "for_cpu_offload" in row_of("on the host", on_host, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_waits_as_documented(sections, tmp_path, optimizer):
    assert (
        row_of(f"one process, {optimizer}", sections(**of_optimizer(optimizer)), tmp_path)
        in on_page()
    )


@pytest.mark.parametrize("engine", ["one process", "DDP", "FSDP2"])
def test_the_page_says_that_these_engines_never_wait(engine):
    assert f"| {engine} | 0 | 0 |" in on_page()


def test_released_gradients_with_an_evaluation_samples_and_background_saves(
    sections, tmp_path, corpus
):
    changed = sections(
        optimizer={"name": "adamw", "rounding": "stochastic", "release_gradients": True},
        model={"dtype": "bfloat16"},
        training={"max_grad_norm": 0},
        budget={"tokens": 5 * 128, "global_batch_tokens": 128},
        evaluation={
            "perplexity": [{"name": "held", "path": str(corpus / "held_out.jsonl")}],
            "prompts": ["The river"],
            "every_steps": 4,
        },
        checkpoints={"every_steps": 2, "in_background": True},
    )
    run = run_labelled(changed, tmp_path)
    in_scoring = {
        wait.place for wait in run.operations.gpu.waits if "evaluation/scoring" in wait.place
    }
    of_set, of_prompt = (
        f"cpt/evaluation/scoring.py:{name}" for name in ("losses_of_set", "continue_prompts")
    )
    assert in_scoring == {of_set, of_prompt}  # not one for each batch of a set
    assert read_metrics(run.trainer.run_folder, ["eval_held_loss"]).last("eval_held_loss") < 6


def test_a_background_save_copies_after_the_update(sections, tmp_path):
    """Without an evaluation, which would wait for the update before."""
    changed = sections(
        model={"dtype": "bfloat16"}, checkpoints={"every_steps": 2, "in_background": True}
    )
    run = run_labelled(changed, tmp_path)
    assert (run.trainer.run_folder / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    "lora", [pytest.param(None, marks=pytest.mark.slow), {"r": 4}], ids=["a copy", "an adapter"]
)
def test_a_model_is_kept_close_to_its_base(sections, tmp_path, corpus, tokenizer_folder, lora):
    sources = [
        {"path": str(corpus / "domain.jsonl"), "weight": 0.5},
        {"path": str(corpus / "general.jsonl"), "weight": 0.5, "replay_kl": 0.5},
    ]
    model = {
        "path": str(save_llama(tmp_path / "model", tokenizer_folder, seed=1)),
        "lora": lora,
        "dtype": "bfloat16",
    }
    changed = sections(stage="cpt", data={"sources": sources}, training={"logging_steps": 5})
    run = run_labelled({**changed, "model": model}, tmp_path)
    assert read_metrics(run.trainer.run_folder, ["replay_kl"]).last("replay_kl") > 0


@pytest.mark.slow
def test_two_processes_share_each_row_on_their_gpus(sections, tmp_path):
    shared = {**zero(2), "parallelism_config": {"sp_size": 2}, "logging_steps": 1}
    changed = sections(training=shared, model={"dtype": "auto", "attention": "varlen"})
    runs = [partial(run_in_group_of_two, changed, tmp_path, rank) for rank in range(2)]
    first, second = (json.loads(losses) for losses in in_children(runs, tmp_path))
    assert first == second and first[-1] < first[0]


def run_in_group_of_two(changed, folder, rank):
    group = process_group(rank, 2, dist.FileStore(str(folder / "store"), 2))
    own = folder / str(rank)
    own.mkdir()
    logs = run_labelled(changed, own, group=group).trainer.state.log_history
    return json.dumps([log["loss"] for log in logs if "loss" in log])
