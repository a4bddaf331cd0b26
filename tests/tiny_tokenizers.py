"""Tiny tokenizers of the kinds that published models have."""

import json
from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from transformers import (
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

TEXTS = [
    "the model reads a document and learns which word comes after which other word in the text of its domain.\n",
    "Der Satz ist anders: Straße, Übung, 2024 und 10.000 Wörter.\n",
    "你好，世界。こんにちは 안녕하세요 привет мир\n",
    "for i in range(10):\n    print(i)\n",
] * 3
CODE = [
    f"def {name}_of(self, values):\n        return [self.{name}(value) for value in values if value is not None]\n\n#"
    f" 世界 {name}\n"
    for name in ("length", "weight", "colour", "height", "distance", "表示")
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(size: int = 330, **model: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    split = pre_tokenizers.Split(
        Regex(
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "isolated",
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def vocabulary_and_merges(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def gpt2() -> PreTrainedTokenizerBase:
    """Its special token is in the vocabulary, at its end."""
    vocabulary, merges = vocabulary_and_merges(byte_level())
    return GPT2Tokenizer(vocab=vocabulary | {SPECIAL[0]: len(vocabulary)}, merges=merges)


def qwen2() -> PreTrainedTokenizerBase:
    """Its special tokens have ids behind the vocabulary."""
    vocabulary, merges = vocabulary_and_merges(byte_level())
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=SPECIAL[1:])


def llama3() -> PreTrainedTokenizerBase:
    """Whole words that are tokens are not merged at all, and a begin token stands in front."""
    tokenizer = byte_level(ignore_merges=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    begin = tokenizer.token_to_id(SPECIAL[1])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{SPECIAL[1]} $A", pair=None, special_tokens=[(SPECIAL[1], begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[0]
    )


def sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Words marked by the sign before them; characters that it does not know are written in bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    tokenizer.train_from_iterator(
        TEXTS[:2], trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    learned, merges = vocabulary_and_merges(tokenizer)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {token: number for number, token in enumerate([*first, *learned])}, merges


def llama2() -> PreTrainedTokenizerBase:
    """SentencePiece's merges: a whole text is one word."""
    vocabulary, merges = sentencepiece_vocabulary()
    return LlamaTokenizer(vocab=vocabulary, merges=merges)


def old_llama2() -> PreTrainedTokenizerBase:
    """The same as older conversions write it: a normalizer, and no pre-tokenizer."""
    vocabulary, merges = sentencepiece_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


KINDS = {"gpt2": gpt2, "qwen2": qwen2, "llama3": llama3, "llama2": llama2, "old_llama2": old_llama2}


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str | Sequence[str]) -> list:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
