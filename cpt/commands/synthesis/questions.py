"""From a text to the ids that the model is asked with: the prompt around it, in the chat template where the tokenizer
has one."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from cpt.commands.synthesis.prompts import TEXT
from cpt.data.store.tokenization import adds_bos
from cpt.errors import RecipeError

PLACE = "\ufdd0the text goes here\ufdd0"  # no text has this character (a noncharacter of Unicode)
SEPARATORS = ("\n\n", "\n", ". ", " ")


class RewriteQuestion:
    """A template, made ready for a tokenizer.

    A text never becomes a special token: `<|im_end|>` in a document is text like any other, so a document cannot end
    its turn of the chat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = template.split(TEXT, 1)
        self._is_chat = tokenizer.chat_template is not None
        if not self._is_chat:
            self._head = (
                [int(tokenizer.bos_token_id)] if adds_bos(tokenizer) and tokenizer.bos_token_id is not None else []
            )
            self._tail: list[int] = []
        else:
            self._head, self._tail = (encode(tokenizer, part, as_text=False) for part in chat_around(tokenizer))

    def ids(self, text: str) -> list[int]:
        asked = self._before + text + self._after.replace(TEXT, text)
        return [*self._head, *encode(self._tokenizer, asked.strip() if self._is_chat else asked), *self._tail]

    def num_tokens_around(self) -> int:
        """Tokens of the question without a text."""
        return len(self.ids(""))


def chat_around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before and after a question. Models that can think aloud are told not to (Qwen3
    reads that option)."""
    message = [{"role": "user", "content": PLACE}]
    chat = str(
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    )
    before, place, after = chat.partition(PLACE)
    if not place:
        raise RecipeError(
            f"the chat template of `{tokenizer.name_or_path}` does not write what the user says. Choose another"
            " --model."
        )
    return before, after


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_text: bool = True) -> list[int]:
    """The ids of a text; those of special tokens only where it is ours."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"])


def cut(
    text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase, separators: Sequence[str] = SEPARATORS
) -> list[str]:
    """A text in pieces of at most `max_tokens` tokens, cut at ends of paragraphs; where one is too long, of lines,
    sentences or words."""
    if len(encode(tokenizer, text)) <= max_tokens:
        return [text]
    if not separators:
        half = len(text) // 2
        return (
            [text]
            if half == 0
            else [*cut(text[:half], max_tokens, tokenizer, ()), *cut(text[half:], max_tokens, tokenizer, ())]
        )
    separator, *finer = separators
    parts = [part + separator for part in text.split(separator)]
    parts[-1] = parts[-1].removesuffix(separator)
    pieces = ["".join(group).strip() for group in filled(parts, max_tokens, tokenizer)]
    return [small for piece in pieces if piece for small in cut(piece, max_tokens, tokenizer, finer)]


def filled(parts: Sequence[str], max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[str]]:
    """Parts that come one after the other, as many together as there is room for."""
    lengths = [
        len(ids) for ids in tokenizer(list(parts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ]
    groups, group, room = [], 0, max_tokens
    for length in lengths:
        if length > room and room < max_tokens:
            group, room = group + 1, max_tokens
        groups.append(group)
        room -= length
    for _, numbers in groupby(range(len(parts)), key=lambda number: groups[number]):
        yield [parts[number] for number in numbers]
