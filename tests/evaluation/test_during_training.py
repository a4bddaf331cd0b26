"""Samples of what the model writes, and the stop before it forgets too much."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from run_folders import write_lines
from tiny_checkpoints import random_llama
from torch import nn
from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import Interrupted
from cpt.evaluation.scoring import PromptSamples, StopWhenForgetting, continue_prompts, read_course
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
