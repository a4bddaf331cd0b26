"""Rows that two processes share (DeepSpeed Ulysses) teach what whole rows do, and any run of ZeRO resumes from their
checkpoints."""

import json

import pytest
from launching import launch_to_its_end, losses, zero_profile
from resuming import differences, forget_after, recipe_of
from tiny import write_recipe

from cpt.runs.events import read_events

SHARED = "training.parallelism_config={sp_size: 2}"
STEPS, SOURCES, EVALUATION = (
    ("loss", "grad_norm"),
    ("loss_domain", "loss_general"),
    ("eval_held_out_loss",),
)


@pytest.fixture(autouse=True)
def varlen(tiny_recipe):
    tiny_recipe["model"]["attention"] = "varlen"


def figures(run, names=STEPS):
    """These values of all logs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in names if name in line]


@pytest.mark.slow
def test_two_processes_that_share_packed_rows_learn_what_one_does(tiny_recipe, corpus, tmp_path):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}]}
    launch_to_its_end(write_recipe({**tiny_recipe, "name": "alone"}, tmp_path / "alone.yaml"))
    recipe = write_recipe({**tiny_recipe, "name": "shared"}, tmp_path / "shared.yaml")
    launch_to_its_end(
        recipe, processes=2, arguments=(f"training.deepspeed={zero_profile(tmp_path, 2)}", SHARED)
    )
    runs = tmp_path / "runs"
    for names, count in ((STEPS, 16), (SOURCES, 4), (EVALUATION, 2)):
        expected = figures(runs / "alone", names)
        assert len(expected) >= count and figures(runs / "shared", names) == pytest.approx(
            expected, rel=1e-5
        )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_resumes_exactly_and_without_shared_rows_and_on_one_process(
    tiny_recipe, tmp_path, stage
):
    del tiny_recipe["budget"]["global_batch_tokens"]
    tiny_recipe["training"] |= {"gradient_accumulation_steps": 2}
    recipe, run = (
        recipe_of(tiny_recipe, tmp_path, stage=stage, dropout=0.0),
        tmp_path / "runs" / "tiny",
    )
    launch_to_its_end(recipe, processes=2, arguments=(SHARED,))
    straight = losses(run)
    last = (run / "checkpoint-8").rename(tmp_path / "straight")
    forget_after(run, 5)
    launch_to_its_end(recipe, processes=2, arguments=(SHARED,))
    assert losses(run) == straight and differences(last, run / "checkpoint-8") == []
    for step, processes in ((3, 2), (6, 1)):
        forget_after(run, step)
        launch_to_its_end(recipe, processes=processes)
        assert losses(run) == pytest.approx(straight, rel=2e-6)
    assert [event["kind"] for event in read_events(run)] == ["elastic"]
