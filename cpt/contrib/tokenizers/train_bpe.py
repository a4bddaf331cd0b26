"""Train a byte-level BPE tokenizer: any text is restored exactly from its tokens, and no token is unknown."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cpt.errors import DataError, RecipeError

# As in MiniMind, with ids 0, 1 and 2: padding, begin and end of a document (or of a chat turn).
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = 256
# As in Qwen2: words with the space or symbol before them, each digit alone, runs of symbols, line ends, spaces.
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_bpe(
    documents: Iterable[str],
    vocabulary_size: int,
    folder: Path,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> PreTrainedTokenizerFast:
    """Train on `documents` and save to `folder`, which `AutoTokenizer.from_pretrained` can load.

    The same documents give the same files. The vocabulary has exactly this size: special tokens, bytes, merges.

    Args:
        special_tokens: padding, begin of document, end of document, then any others.

    Raises:
        RecipeError: the size is too small for the bytes and the special tokens.
        DataError: there is no text, or too little of it to fill the vocabulary.
    """
    smallest = BYTES + len(special_tokens)
    if vocabulary_size < smallest:
        raise RecipeError(
            f"{vocabulary_size:,} tokens are too few: the bytes and {len(special_tokens)} special tokens already need"
            f" {smallest}. 4,000 suit a small model, 32,000 and up a large one."
        )
    tokenizer = untrained_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in special_tokens
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(non_empty(documents), trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocabulary_size:
        shortage = f"too little text for {vocabulary_size:,} tokens: it yields at most {reached:,}"
        raise DataError(f"{shortage}. Add text, or set at most {reached:,} tokens.")
    pad, begin, end = special_tokens[:3]
    # With a begin token, the first word of a document is learned and evaluated like any other.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin} $B",
        special_tokens=[(begin, tokenizer.token_to_id(begin))],
    )
    trained = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end
    )
    if {pad, begin, end} >= set(SPECIAL_TOKENS):
        trained.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    trained.save_pretrained(folder)
    return trained


def untrained_tokenizer() -> Tokenizer:
    """BPE over the UTF-8 bytes of words, without normalisation, so it is lossless."""
    tokenizer = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, behavior="isolated"), letters]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def non_empty(documents: Iterable[str]) -> Iterator[str]:
    """The documents with text; DataError if all are empty."""
    is_empty = True
    for document in documents:
        if document.strip():
            is_empty = False
            yield document
    if is_empty:
        raise DataError("every document is empty. Check the files and the text column.")
