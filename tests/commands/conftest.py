"""Run commands as a user does, and what they work on: sources, a tiny model that writes bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import write_recipe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from cpt.cli import main

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CHAT = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte, then four special tokens."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    return made


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same, with turns of a chat."""
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedModel]:
    """`make_model("llama")`: large random weights, so that its answers differ."""

    def make(model_type: str, **options: object) -> PreTrainedModel:
        torch.manual_seed(0)
        names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048} if model_type == "gpt2" else SHAPE
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(
            model_type, vocab_size=len(tokenizer), initializer_range=0.3, **names, **ends, **options
        )
        return AutoModelForCausalLM.from_config(config).eval()

    return make


@pytest.fixture
def model_folder(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Path:
    """A model and its tokenizer, saved."""
    make_model("llama", max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cpt_data(capsys):
    """`cpt_data("ingest", "--help")`: the exit code and what was printed."""

    def command(*words):
        try:
            main(["data", *map(str, words)])
        except SystemExit as ended:
            return ended.code, "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    return command


@pytest.fixture
def run(tiny_recipe, tmp_path, cpt_data):
    """`run("check", {"on_bad_row": "skip"})`: the exit code and what was printed, on one good and one bad source."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good one"}\n{"text": null}\n{"text": ""}\nnot json\n')

    def command(name, data, *options):
        tiny_recipe["data"]["sources"].append({"path": str(bad)})
        tiny_recipe["data"] |= data
        return cpt_data(name, write_recipe(tiny_recipe, tmp_path / "r.yaml"), *options)

    return command


@pytest.fixture
def cpt_tokenizer(capsys):
    def run(*words: object) -> tuple[int, str]:
        code = 0
        try:
            main(["tokenizer", *map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run
