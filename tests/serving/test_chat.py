import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import CheckpointError, LaunchError


def test_a_model_without_a_chat_template_is_refused_with_the_ways_out(plain_folder):
    result = CliRunner().invoke(application("chat"), ["chat", str(plain_folder)])
    assert isinstance(result.exception, CheckpointError)
    assert "no chat template" in str(result.exception) and "cpt serve" in str(result.exception)


def test_a_word_that_sets_nothing_is_refused_before_the_model_is_loaded(chat_folder):
    result = CliRunner().invoke(application("chat"), ["chat", str(chat_folder), "nonsense"])
    assert isinstance(result.exception, LaunchError) and "`nonsense`: what goes to the generation" in str(
        result.exception
    )


@pytest.mark.slow
def test_a_piped_chat_answers_each_line(chat_folder):
    words = [str(Path(sys.executable).parent / "cpt"), "chat", str(chat_folder), "max_new_tokens=4", "do_sample=False"]
    ended = subprocess.run(
        words, input="the model reads\n\na document\n!exit\nnever\n", capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    model = AutoModelForCausalLM.from_pretrained(chat_folder)
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    messages, expected = [], ""
    for line in ("the model reads", "a document"):
        messages.append({"role": "user", "content": line})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = model.generate(**ids, do_sample=False, max_new_tokens=4)[0, ids["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(written, skip_special_tokens=True)})
        expected += messages[-1]["content"] + "\n"
    assert ended.stdout.replace("\r\n", "\n").endswith(expected)
