import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import RecipeError

IDS = torch.arange(30).unsqueeze(0)


def merge(*words):
    """What the command prints; its errors as they are raised."""
    result = CliRunner().invoke(application("merge"), ["merge", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_a_chat_vector_is_written_and_loaded_back(base_folder, tokenizer_folder, tmp_path):
    after, chat = (
        save_llama(tmp_path / name, tokenizer_folder, seed) for seed, name in enumerate(("after", "chat"), 4)
    )
    words = ("--after", after, "--base", base_folder, "--chat", chat, "-o", tmp_path / "out")
    told = merge("--method", "task_arithmetic", *words)
    assert "Loaded back by plain transformers" in told and "Tokens added" in told
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits.isfinite().all()


@pytest.mark.slow
def test_a_mean_is_written_in_the_dtype_that_was_asked(base_folder, tokenizer_folder, tmp_path):
    other = save_llama(tmp_path / "other", tokenizer_folder, 5)
    told = merge("--method", "average", base_folder, other, "-o", tmp_path / "out", "--dtype", "bfloat16")
    assert "The mean of 2 models" in told and "bfloat16 in 1 safetensors file" in told
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_base_that_is_named(base_folder, adapter_folder, tmp_path):
    told = merge("--method", "lora", base_folder, adapter_folder, "-o", tmp_path / "out")
    assert "Adapter against merged model in float32" in told and "float32 in 1 safetensors file" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "lora", "one"], "takes two folders, BASE and ADAPTER, not 1"),
        (["--method", "average", "one", "two", "--scale", "0.5"], "belong to --method task_arithmetic"),
        (["--method", "average", "one", "two", "--tolerance", "0.5"], "--tolerance belongs to --method lora"),
        (["--method", "task_arithmetic", "--after", "one"], "takes --after CPT --base BASE --chat CHAT"),
    ],
)
def test_options_of_another_method_are_refused(tmp_path, words, message):
    with pytest.raises(RecipeError, match=message):
        merge(*words, "-o", tmp_path / "out")
