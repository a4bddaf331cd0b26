"""A model of random weights that writes bytes, in a folder, and texts for it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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
def corpus(tmp_path: Path) -> Path:
    """Seven documents of different lengths."""
    file = tmp_path / "corpus.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": f"Document {number}. " + "It says a thing. " * number}) + "\n" for number in range(7)
        )
    )
    return file
