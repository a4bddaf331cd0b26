import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import disk_of_its_own, fill
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState

from cpt.errors import Interrupted
from cpt.evaluation.scoring import PromptSamples, continue_prompts
from cpt.runs.events import read_events, write_waiting_events
from cpt.tokenizer.train_bpe import train_bpe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_bpe(["def one(x):\n    return x\n"] * 9, 262, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        initializer_range=0.3,
        attention_dropout=0.5,
        bos_token_id=1,
        eos_token_id=2,
        **shape,
    )
    return LlamaForCausalLM(config).train()


def greedy_by_hand(model, tokenizer, prompt, steps):
    ids = tokenizer(prompt)["input_ids"]
    begin = len(ids)
    model.eval()
    for _ in range(steps):
        ids.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
        if ids[-1] == tokenizer.eos_token_id:
            break
    model.train()
    return tokenizer.decode(ids[begin:], skip_special_tokens=True)


def test_the_continuation_is_the_most_likely_token_each_time(model, tokenizer):
    prompts = ["def", "    return x", "x"]
    expected = [greedy_by_hand(model, tokenizer, prompt, 12) for prompt in prompts]
    assert continue_prompts(model, tokenizer, prompts, max_new_tokens=12) == expected


def test_a_sampling_generation_config_is_set_aside_and_comes_back(model, tokenizer):
    greedy = continue_prompts(model, tokenizer, ["def"], max_new_tokens=12)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=3.0, repetition_penalty=2.0, max_new_tokens=1
    )
    assert continue_prompts(model, tokenizer, ["def"], max_new_tokens=12) == greedy
    assert model.generation_config.repetition_penalty == 2.0


def test_training_goes_on_as_if_nothing_was_generated(model, tokenizer):
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
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert continue_prompts(adapted, tokenizer, ["def"], max_new_tokens=8) == plain


def test_samples_are_written_before_the_first_and_after_the_last_step_only(model, tokenizer, tmp_path):
    samples = PromptSamples(tmp_path / "run" / "samples.jsonl", tokenizer, ["def", "x"], max_new_tokens=3)
    for step in (0, 7):  # the second begin is a resumed run's
        samples.on_train_begin(None, TrainerState(global_step=step), TrainerControl(), model=model)
    samples.on_train_end(None, TrainerState(global_step=9), TrainerControl(), model=model)
    lines = [json.loads(line) for line in samples.lines.path.read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(0, "def"), (0, "x"), (9, "def"), (9, "x")]
    assert lines[0]["continuation"] == continue_prompts(model, tokenizer, ["def"], max_new_tokens=3)[0]


def test_on_a_full_disk_samples_wait_for_room(model, tokenizer, tmp_path, caplog):
    with disk_of_its_own(tmp_path / "disk", "64k") as disk:
        samples = PromptSamples(disk / "samples.jsonl", tokenizer, ["def", "x"], max_new_tokens=3)
        ballast = fill(disk)
        samples.on_train_begin(None, TrainerState(), TrainerControl(), model=model)
        assert "samples of step 0" in caplog.text
        ballast.unlink()
        samples.on_train_end(None, TrainerState(global_step=9), TrainerControl(), model=model)
        assert [json.loads(line)["step"] for line in samples.lines.path.read_text().splitlines()] == [0, 0, 9, 9]
        write_waiting_events(disk)
        assert [event["kind"] for event in read_events(disk)] == ["not_written"]


def test_a_run_that_is_told_to_stop_writes_no_more_samples(model, tokenizer, tmp_path):
    asked = []

    def stop_at_the_second():
        asked.append(1)
        if len(asked) == 2:
            raise Interrupted("stopped by SIGTERM")

    samples = PromptSamples(
        tmp_path / "samples.jsonl", tokenizer, ["def", "x", "y"], 3, before_each=stop_at_the_second
    )
    control = TrainerControl()
    samples.on_train_begin(None, TrainerState(), control, model=model)
    assert control.should_training_stop and len(asked) == 2 and not samples.lines.path.exists()


@pytest.mark.slow
def test_under_zero3_two_processes_measure_and_write_what_a_plain_model_does(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    script = Path(__file__).with_name("zero3_run.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
        str(tmp_path),
    ]
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja stands beside python
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": search_path}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    results = [
        json.loads(line.removeprefix("RESULT ")) for line in answer.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert len(results) == 2
    for result in results:
        assert result["parted"]
        assert result["training"]
        for figures, texts in zip(result["figures"], result["texts"], strict=True):
            assert figures == pytest.approx(results[0]["figures"][0], rel=1e-6)
            assert texts == results[0]["texts"][0]
