"""Samples of what the model writes, and the stop before it forgets too much."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from run_folders import write_lines
from tiny_checkpoints import random_llama
from tiny_trainers import losses, published, trainer_of
from torch import nn
from transformers import (
    GenerationConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from cpt.checkpoints.resume import latest_checkpoint
from cpt.errors import Interrupted, RecipeError
from cpt.evaluation.scoring import (
    PromptSamples,
    StopEarly,
    StopWhenForgetting,
    continue_prompts,
    read_course,
)
from cpt.recipe.schema import EarlyStop
from cpt.runs.record import Run


@pytest.fixture
def model():
    return random_llama(attention_dropout=0.5, bos_token_id=1, eos_token_id=2).train()


def greedy_by_hand(model, tokenizer, prompt, steps):
    ids = tokenizer(prompt)["input_ids"]
    begin = len(ids)
    model.eval()
    for _ in range(steps):
        ids.append(
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()
        )
        if ids[-1] == tokenizer.eos_token_id:
            break
    model.train()
    return tokenizer.decode(ids[begin:], skip_special_tokens=True)


def test_the_continuation_is_the_most_likely_token_each_time(model, tokenizer):
    prompts = ["the model", "    reads", "x"]
    expected = [greedy_by_hand(model, tokenizer, prompt, 12) for prompt in prompts]
    assert continue_prompts(model, tokenizer, prompts, max_new_tokens=12) == expected


def test_a_sampling_generation_config_is_set_aside_and_comes_back(model, tokenizer):
    greedy = continue_prompts(model, tokenizer, ["def"], max_new_tokens=12)
    own = GenerationConfig(
        do_sample=True, temperature=3.0, repetition_penalty=2.0, max_new_tokens=1
    )
    model.generation_config = own
    assert continue_prompts(model, tokenizer, ["def"], max_new_tokens=12) == greedy
    assert model.generation_config is own and own.repetition_penalty == 2.0


def test_training_continues_as_if_nothing_was_generated(model, tokenizer):
    model.config.use_cache = False
    random_state = torch.get_rng_state()
    continue_prompts(model, tokenizer, ["def"], max_new_tokens=4)
    assert model.config.use_cache is False
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())


def test_a_wrapped_model_and_a_fresh_adapter_write_the_same(model, tokenizer):
    class Engine(nn.Module):  # what DDP and DeepSpeed do: the model is `module`
        def __init__(self, module):
            super().__init__()
            self.module = module

    plain = continue_prompts(model, tokenizer, ["def"], max_new_tokens=8)
    assert continue_prompts(Engine(model), tokenizer, ["def"], max_new_tokens=8) == plain
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert continue_prompts(adapted, tokenizer, ["def"], max_new_tokens=8) == plain


def steps_of(samples):
    lines = [json.loads(line) for line in samples.lines.path.read_text().splitlines()]
    return [(line["step"], line["prompt"]) for line in lines]


def test_samples_are_written_before_the_first_and_after_the_last_step_only(
    model, tokenizer, tmp_path
):
    samples = PromptSamples(
        tmp_path / "run" / "samples.jsonl", tokenizer, ["def", "x"], max_new_tokens=3
    )
    assert samples.max_new_tokens == 3
    assert PromptSamples(tmp_path / "others.jsonl", tokenizer, []).max_new_tokens == 64
    for step in (0, 7):  # the second begin is a resumed run's
        samples.on_train_begin(None, TrainerState(global_step=step), TrainerControl(), model=model)
    samples.on_train_end(None, TrainerState(global_step=9), TrainerControl(), model=model)
    assert steps_of(samples) == [(0, "def"), (0, "x"), (9, "def"), (9, "x")]


def test_a_run_that_is_asked_to_stop_writes_no_more_samples(model, tokenizer, tmp_path):
    asked = []

    def stop_at_the_second():
        asked.append(1)
        if len(asked) == 2:
            raise Interrupted("stopped by SIGTERM")

    samples = PromptSamples(
        tmp_path / "samples.jsonl", tokenizer, list("xyz"), 3, before_each=stop_at_the_second
    )
    control = TrainerControl()
    samples.on_train_begin(None, TrainerState(), control, model=model)
    assert control.should_training_stop and len(asked) == 2 and not samples.lines.path.exists()


# Forgetting


def metrics(**sets):
    return {f"eval_{name}_bits_per_byte": value for name, value in sets.items()} | {
        "eval_domain_loss": 1.0
    }


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def evaluate(guard, step, **sets):
    control, state = TrainerControl(), TrainerState(global_step=step, max_steps=100)
    guard.on_evaluate(TrainingArguments(), state, control, metrics=metrics(**sets))
    return control.should_training_stop


def test_a_resumed_run_compares_with_the_values_before_its_first_step(run, tmp_path):
    first, loss = (
        {"step": 0, "tokens": 0, **metrics(general=1.0)},
        {"step": 5, "tokens": 50, "loss": 3.0},
    )
    write_lines(tmp_path / "metrics.jsonl", [first, loss])
    guard = StopWhenForgetting(run, {"general": 0.02})
    guard.on_train_begin(TrainingArguments(), TrainerState(global_step=5), TrainerControl())
    assert evaluate(guard, 10, general=1.03)


def test_a_run_stops_where_a_set_rose_by_more_than_it_may(run):
    """Those that may rise without a limit, and those that are not named, stop nothing."""
    guard = StopWhenForgetting(run, {"general": 0.5, "free": None, "missing": 0.0})
    guard.on_train_begin(TrainingArguments(), TrainerState(global_step=0), TrainerControl())
    values = [(1.0, 1.0, 1.0), (1.5, 9.0, 9.0), (1.25, 9.0, 9.0), (1.5625, 9.0, 9.0)]
    found = [
        evaluate(guard, step, general=general, free=free, domain=domain)
        for step, (general, free, domain) in enumerate(values)
    ]
    assert found == [False, False, False, True]
    status = run.status()
    assert (status["state"], status["step"], status["steps"]) == ("running", 3, 100)
    said = "step 3: bits per byte of `general` rose from 1.0000 to 1.5625 (+56.2%), more than the 50.0%"
    assert said in status["stopped"]


def test_a_run_stops_after_evaluations_without_a_large_enough_improvement(run, caplog):
    """One of a step counts once; the last step ends the run anyway."""
    caplog.set_level("INFO")
    guard = StopEarly(run, EarlyStop(set="domain", patience=2, margin=0.25))
    guard.on_train_begin(TrainingArguments(), TrainerState(), TrainerControl())
    found = []
    losses = [(0, 8.0), (2, 7.75), (4, 7.5), (4, 1.0), (6, 7.25), (8, 7.0), (10, 6.75), (12, 6.75)]
    for step, loss in losses:
        control, state = TrainerControl(), TrainerState(global_step=step, max_steps=12)
        guard.on_evaluate(TrainingArguments(), state, control, metrics={"eval_domain_loss": loss})
        attributes = guard.state()["attributes"]
        assert attributes["evaluated"] == step
        found.append((control.should_save, control.should_training_stop, *attributes.values()))
    assert found == [
        (False, False, 8.0, 0, 0, 0),
        (False, False, 8.0, 0, 2, 1),
        (True, False, 7.5, 4, 4, 0),
        (False, False, 7.5, 4, 4, 0),
        (False, False, 7.5, 4, 6, 1),
        (True, False, 7.0, 8, 8, 0),
        (False, False, 7.0, 8, 10, 1),
        (False, False, 7.0, 8, 12, 2),
    ]
    assert "stopped" not in run.status() and "stopped early" not in caplog.text
    control = TrainerControl()
    resumed = StopEarly(run, EarlyStop(set="domain", patience=2, margin=0.25))
    state = TrainerState(
        global_step=12, max_steps=20, stateful_callbacks={"StopEarly": guard.state()}
    )
    resumed.on_train_begin(TrainingArguments(), state, control)
    assert control.should_training_stop and resumed.state() == guard.state()
    stopped = run.status()["stopped"]
    assert f"The run {stopped}." in caplog.messages
    assert "step 12" in stopped and "0.25 in 2 evaluation(s)" in stopped and "7.0000" in stopped
    assert f"at step 8: cpt export {run.folder / 'checkpoint-8'} --output" in stopped


def test_a_run_that_never_improved_names_no_checkpoint(run):
    guard = StopEarly(run, EarlyStop(set="general", patience=1))
    assert not evaluate(guard, 0, general=1.0) and evaluate(guard, 5, general=1.0)
    assert "was 1.0000, before the first step" in run.status()["stopped"]
    assert "cpt export" not in run.status()["stopped"]


def test_the_course_is_every_evaluation_in_order_and_the_last_of_each_step(tmp_path):
    first, loss = (
        {"step": 0, "tokens": 0, **metrics(domain=2.0)},
        {"step": 5, "tokens": 50, "loss": 3.0},
    )
    twice = [{"step": 10, "tokens": 100, **metrics(domain=value)} for value in (1.0, 1.1)]
    write_lines(tmp_path / "metrics.jsonl", [first, loss, *twice])
    course = read_course(tmp_path / "metrics.jsonl")
    points = [(point.step, point.tokens, point.bits_per_byte["domain"]) for point in course]
    assert points == [(0, 0, 2.0), (10, 100, 1.1)]
    assert read_course(tmp_path / "none.jsonl") == []


# Early stopping


class KilledAfter(TrainerCallback):
    """Ends a run after the save of a step, as a kill does."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def early_stopping(sections, folder, values, *callbacks):
    """A run of eight steps whose held-out set has these bits per byte."""
    stop = {"set": "general", "patience": 3, "margin": 0.1}
    trainer = trainer_of(
        sections,
        folder,
        steps=8,
        callbacks=callbacks,
        checkpoints={"every_steps": 1, "keep": 1},
        evaluation={"held_out_share": 0.3, "every_steps": 1, "stop": stop},
    )
    measured = dict(enumerate(values))
    trainer.measure_held_out = lambda: {
        "general_bits_per_byte": measured[trainer.state.global_step]
    }
    return trainer


VALUES = (3.0, 2.0, 1.0, 0.95, 1.2, 0.9)  # improves by more than 0.1 up to step 2


@pytest.mark.heavy
def test_a_run_stops_where_a_set_no_longer_improves_and_keeps_and_names_the_best_checkpoint(
    tiny_recipe, tmp_path
):
    trainer = early_stopping(tiny_recipe, tmp_path, VALUES)
    trainer.train()
    assert trainer.state.global_step == 5
    assert published(trainer) == ["checkpoint-2", "checkpoint-5"]
    reason = Run(trainer.run_folder).status()["stopped"]
    assert reason.startswith("stopped early at step 5: `general`")
    assert f"1.0000, at step 2: cpt export {trainer.run_folder / 'checkpoint-2'}" in reason


@pytest.mark.heavy
@pytest.mark.parametrize("killed_after", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_resumed_run_stops_at_the_same_step(tiny_recipe, tmp_path, killed_after):
    """Also one that was killed after it had stopped: it trains no further step."""
    with pytest.raises(KeyboardInterrupt):
        early_stopping(tiny_recipe, tmp_path, VALUES, KilledAfter(killed_after)).train()
    resumed = early_stopping(tiny_recipe, tmp_path, VALUES)
    resumed.train(latest_checkpoint(resumed.run_folder))
    assert resumed.state.global_step == 5 and max(losses(resumed)) == 5
    assert Run(resumed.run_folder).status()["stopped"].startswith("stopped early at step 5")


@pytest.mark.slow
def test_a_run_whose_set_improves_to_the_end_is_not_stopped(tiny_recipe, tmp_path):
    trainer = early_stopping(tiny_recipe, tmp_path, [9 - step for step in range(9)])
    trainer.train()
    assert trainer.state.global_step == 8
    assert Run(trainer.run_folder).status().get("stopped") is None


def test_a_set_of_which_a_stage_measures_no_loss_is_refused_at_the_first_evaluation(run):
    stop = StopEarly(run, EarlyStop(set="questions"))
    metrics = {"eval_questions_reward": 1.0}
    with pytest.raises(RecipeError, match=r"`evaluation.stop.set`.*eval_questions_reward"):
        stop.on_evaluate(TrainingArguments(), TrainerState(), TrainerControl(), metrics=metrics)
