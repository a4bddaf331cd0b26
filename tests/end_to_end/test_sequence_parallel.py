"""Rows that two processes share (DeepSpeed Ulysses) teach what whole rows do, and leave checkpoints that any run of
ZeRO goes on from."""

import json

import pytest
from launching import launch, losses, zero_profile
from resuming import differences, forget_after, recipe_of, run_to_its_end
from test_varlen import trainer_of
from tiny import write_recipe
from tiny_models import tiny_config

from cpt.runs.events import read_events

SHARED = "training.parallelism_config={sp_size: 2}"
STEPS, SOURCES, EVALUATION = ("loss", "grad_norm"), ("loss_domain", "loss_general"), ("eval_held_out_loss",)


def figures(run, names=STEPS):
    """What each of its logs tells."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in names if name in line]


@pytest.mark.slow
def test_two_processes_that_share_packed_rows_learn_what_one_does(tiny_recipe, corpus, tmp_path):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}]}
    trainer_of(tiny_recipe, tmp_path, "varlen").train()
    tiny_recipe["model"]["attention"] = "varlen"
    recipe = write_recipe({**tiny_recipe, "name": "shared"}, tmp_path / "shared.yaml")
    profile = f"training.deepspeed={zero_profile(tmp_path, 2)}"
    ended = launch(recipe, way="torchrun", processes=2, arguments=(profile, SHARED))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    runs = tmp_path / "runs"
    for names, count in ((STEPS, 16), (SOURCES, 4), (EVALUATION, 2)):
        expected = figures(runs / "varlen", names)
        assert len(expected) >= count and figures(runs / "shared", names) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_losses_and_norms_are_those_of_one_process_under_each_stage(tiny_recipe, tmp_path, model_type, packing):
    tiny_recipe["model"] |= {"attention": "varlen", "config": {**tiny_config(model_type), "vocab_size": 320}}
    tiny_recipe["data"]["packing"] = packing
    results = {}
    ways = [("one", 1, 0, 1), *((f"zero{stage}", 2, stage, 2) for stage in (1, 2, 3)), ("groups", 4, 2, 2)]
    for name, processes, stage, parts in ways:
        path = write_recipe({**tiny_recipe, "name": name}, tmp_path / f"{name}.yaml")
        arguments = (f"training.deepspeed={zero_profile(tmp_path, stage)}", SHARED) if parts > 1 else ()
        micro_batch = ("training.per_device_train_batch_size=1",) if name == "groups" else ()
        run_to_its_end(path, processes=processes, arguments=(*arguments, *micro_batch))
        results[name] = figures(tmp_path / "runs" / name)
    for name in results:
        assert results[name] == pytest.approx(results["one"], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_layers_computed_again_the_loss_in_chunks_and_worker_processes_change_nothing(tiny_recipe, tmp_path):
    tiny_recipe["model"] |= {"attention": "varlen", "fused_loss": True}
    more = {"gradient_checkpointing": True, "dataloader_num_workers": 1, "per_device_train_batch_size": 1}
    one = write_recipe({**tiny_recipe, "name": "one"}, tmp_path / "one.yaml")
    shared = write_recipe(
        {**tiny_recipe, "name": "two", "training": {**tiny_recipe["training"], **more}}, tmp_path / "two.yaml"
    )
    run_to_its_end(one)
    run_to_its_end(
        shared, processes=2, arguments=(f"training.deepspeed={zero_profile(tmp_path, 3, offload=True)}", SHARED)
    )
    assert figures(tmp_path / "runs" / "two") == pytest.approx(figures(tmp_path / "runs" / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_exactly_and_without_shared_rows_and_on_one_process(tiny_recipe, tmp_path, stage):
    del tiny_recipe["budget"]["global_batch_tokens"]
    tiny_recipe["budget"]["tokens"] = 8 * 256
    tiny_recipe["training"] |= {"gradient_accumulation_steps": 2}
    tiny_recipe["model"]["attention"] = "varlen"
    recipe = recipe_of(tiny_recipe, tmp_path, stage=stage, dropout=0.0)
    run = tmp_path / "runs" / "tiny"
    run_to_its_end(recipe, processes=2, arguments=(SHARED,))
    straight = losses(run)
    last = (run / "checkpoint-8").rename(tmp_path / "straight")
    forget_after(run, 5)
    run_to_its_end(recipe, processes=2, arguments=(SHARED,))
    assert losses(run) == straight and differences(last, run / "checkpoint-8") == []
    forget_after(run, 3)
    run_to_its_end(recipe, processes=2)
    assert losses(run) == pytest.approx(straight, rel=2e-6)
    forget_after(run, 6)
    run_to_its_end(recipe)
    assert losses(run) == pytest.approx(straight, rel=2e-6)
    assert [event["kind"] for event in read_events(run)] == ["elastic"]
