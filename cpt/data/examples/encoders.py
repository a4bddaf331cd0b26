"""The encoder that a source needs: for texts, gaps to fill, chats, or examples."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.data.examples.chat_template import Refused, control_pattern, marked, rendered, same_every_day
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.readers.chat import NOT_TOKEN, transcript
from cpt.data.readers.documents import DocumentView
from cpt.data.readers.example import example_of
from cpt.data.readers.forms import form_of_source
from cpt.data.store.tokenization import HARD_STRINGS, PIECE, DocumentEncoder, Flat, Ids, first_difference, shortened
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Component, DocumentSource, Source

log = logging.getLogger("cpt")


class ChatEncoder(DocumentEncoder):
    """Encodes the transcripts of chats (`chat.py`) as the chat template writes them.

    BOS comes first where the tokenizer puts one, and EOS last, each unless the template wrote it there (blanks after
    it not counted).

    There are two ways. Hugging Face's tokenizer reads at once all that the template wrote. Or the control tokens are
    taken out, and the texts between them encoded like documents: gigatoken's way, taken where `proven_for` finds the
    ids equal, and that of each chat with a special token's text in a message.

    Args:
        key: where the source stands in the recipe, for messages.

    Raises:
        RecipeError: the tokenizer has no chat template.
    """

    def __init__(self, encoder: DocumentEncoder, key: str) -> None:
        vars(self).update(vars(encoder))
        if encoder.chat_template is None:
            raise RecipeError(
                f"`{key}.chat`: the tokenizer `{encoder.name}` has no chat template. Set `tokenizer.path` to one that"
                " has (that of the model's chat version), or write the chat's text into a column and name it as"
                " `text_column`."
            )
        self.template = same_every_day(encoder.chat_template)
        self.by_parts = False
        self.fingerprint = xxh3_128_hexdigest(
            f"{encoder.fingerprint} {self.template} {sorted(self.named_tokens.items())}".encode()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_whole", "_control")}

    def filters(self) -> list[Component]:
        """Drops the chats that the template refuses, counted by what it says; it must be the last one."""
        options = {"template": self.template, "named_tokens": self.named_tokens}
        return [Component.model_validate({"name": "cpt.data.examples.encoders:refused", **options})]

    def proven_for(self, documents: Sequence[str]) -> "ChatEncoder":
        """An encoder of the same ids for chats like these: gigatoken's where all of them, and hard ones, come out the
        same."""
        pairs = zip(HARD_STRINGS, HARD_STRINGS[1:], strict=False)
        hard = [
            transcript([{"role": "user", "content": a}, {"role": "assistant", "content": b}], "") for a, b in pairs
        ]
        usable = [
            text
            for text in [*hard, *documents]
            if len(text) <= PIECE and not why_refused(text, self.template, self.named_tokens)
        ]
        chats = [self.written(text) for text in usable]
        faster = super().proven_for([part for chat in chats for part in self._split(chat)[::2]])
        if not isinstance(faster, ChatEncoder) or faster._gigatoken is None:
            return self
        ordinary = [chat for chat in chats if NOT_TOKEN not in chat]
        if (chat := first_difference(ordinary, self._encode_whole, faster._encode_by_parts)) is not None:
            log.info(
                f"{faster.engine} is not used for chats: the ids differ for {shortened(chat)!r}. Hugging Face's"
                " tokenizer does the work."
            )
            return self
        faster.by_parts = True
        return faster

    def encode(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]:
        """The ids of all chats, one after the other, and how many each has."""
        chats = [self.written(text) for text in texts]
        in_parts = np.array([self.by_parts or NOT_TOKEN in chat for chat in chats], bool)
        ids: list[Ids] = [np.empty(0, self.dtype)] * len(chats)
        for chosen, encode in ((in_parts, self._encode_by_parts), (~in_parts, self._encode_whole)):
            numbers = np.flatnonzero(chosen).tolist()
            flat, lengths = encode([chats[number] for number in numbers])
            for number, part in zip(numbers, np.split(flat, lengths.cumsum()[:-1]), strict=False):
                ids[number] = self._framed(part, chats[number])
        return np.concatenate([np.empty(0, self.dtype), *ids]), np.array([len(part) for part in ids], np.int64)

    def written(self, text: str) -> str:
        """What the template makes of a transcript; special tokens' text in a message is marked by NOT_TOKEN inside."""
        try:
            return render(marked(text, self._control), self.template, self.named_tokens)
        except Refused as problem:
            raise DataError(f"a chat cannot be written: {problem}. It begins: {text[:80]!r}") from problem

    def _encode_whole(self, chats: Sequence[str]) -> Flat:
        if self._slow is None:
            parts = [
                np.array(encoding.ids, self.dtype)
                for encoding in self._whole.encode_batch_fast(list(chats), add_special_tokens=False)
            ]
        else:
            parts = [np.array(self._slow(chat, add_special_tokens=False)["input_ids"], self.dtype) for chat in chats]
        return np.concatenate([np.empty(0, self.dtype), *parts]), np.array([len(part) for part in parts], np.int64)

    def _encode_by_parts(self, chats: Sequence[str]) -> Flat:
        split = [self._split(chat) for chat in chats]  # text, control token, text, control token ... text
        pieces = [piece for some in split for piece in some]
        is_text = np.concatenate([np.empty(0, bool), *(np.arange(len(some)) % 2 == 0 for some in split)]).astype(bool)
        texts = [piece for piece, whether in zip(pieces, is_text.tolist(), strict=True) if whether]
        text_ids, text_lengths = self._without_special(*self._encode_batch(texts))
        lengths = np.ones(len(pieces), np.int64)
        lengths[is_text] = text_lengths
        ids = np.empty(int(lengths.sum()), self.dtype)
        from_text = np.repeat(is_text, lengths)
        ids[from_text] = text_ids
        ids[~from_text] = [
            self.control_tokens[piece] for piece, whether in zip(pieces, is_text.tolist(), strict=True) if not whether
        ]
        chat_of = np.repeat(np.arange(len(chats)), [len(some) for some in split])
        return ids, np.bincount(chat_of, lengths, len(chats)).astype(np.int64)

    def _split(self, chat: str) -> list[str]:
        """What the template wrote, at its control tokens; the texts without the mark of what is none."""
        return [piece.replace(NOT_TOKEN, "") for piece in self._control.split(chat)]

    def _framed(self, ids: Ids, chat: str) -> Ids:
        """With BOS and EOS, each once."""
        before = [] if self.bos is None or ids[:1].tolist() == [self.bos] else [self.bos]
        after = [] if chat.rstrip().endswith(self.named_tokens["eos_token"]) else [self.eos]
        return np.concatenate([np.array(before, self.dtype), ids, np.array(after, self.dtype)])

    @cached_property
    def _whole(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._model)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return control_pattern(list(self.control_tokens))


def refused(document: DocumentView, *, template: str, named_tokens: dict[str, Any]) -> str | None:
    """The filter behind `ChatEncoder.filters`."""
    return why_refused(document["text"], template, named_tokens)


def why_refused(text: str, template: str, named_tokens: Mapping[str, Any]) -> str | None:
    """Why a text cannot be written as a chat; many templates want the roles to alternate."""
    try:
        render(text, template, named_tokens)
    except Refused as problem:
        return str(problem)
    return None


def render(text: str, template: str, named_tokens: Mapping[str, Any]) -> str:
    """A transcript as the template writes it.

    Raises:
        Refused: it is no transcript, or the template does not take its messages.
    """
    example = example_of(text)
    if example is None or not isinstance(example.messages, list):
        raise Refused("no chat (any more): a file without columns, or a transform that changed lines")
    return rendered(example.messages, example.tools, template, named_tokens)[0]


# --- fill in the middle ---


MARKS = [  # before the prefix, the suffix and the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
]


class MiddleEncoder(DocumentEncoder):
    """Encodes a share of the documents as prefix, suffix, middle, or as suffix, prefix, middle; the others as they
    are.

    Which documents, and where they are cut, follows from the hash of their text. Cuts lie between any two characters,
    as they do where an editor asks, so the parts are encoded by themselves.

    Raises:
        RecipeError: the tokenizer has no marks.
    """

    def __init__(self, encoder: DocumentEncoder, options: Mapping[Any, float], key: str) -> None:
        vars(self).update(vars(encoder))
        self.options = {"rate": 0.5, "suffix_first_rate": 0.5, **options}
        ids = [[encoder.id_of(mark) for mark in marks] for marks in MARKS]
        self.marks = next(([id_ for id_ in found if id_ is not None] for found in ids if None not in found), [])
        if not self.marks:
            known = "; ".join(" ".join(marks) for marks in MARKS)
            raise RecipeError(
                f"`{key}.fill_in_the_middle`: the tokenizer `{encoder.name}` has no marks for it (looked for {known})."
                " Remove the key, or add such tokens to the tokenizer."
            )
        self.fingerprint = xxh3_128_hexdigest(f"{encoder.fingerprint} {self.marks} {self.options}".encode())

    def encode(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]:
        """The ids of all texts, one document after the other, and how many each has."""
        parts = [self.parts_of(text) for text in texts]
        ids, lengths = super().encode([part for some in parts for part in some])
        first = 0 if self.bos is None else 1
        each = iter(part[first:-1] for part in np.split(ids, lengths.cumsum()[:-1]))  # without BOS and EOS
        documents = [self.joined([next(each) for _ in some], text) for some, text in zip(parts, texts, strict=True)]
        return np.concatenate([np.empty(0, self.dtype), *documents]), np.array(
            [len(ids) for ids in documents], np.int64
        )

    def parts_of(self, text: str) -> list[str]:
        if drawn(text, "rate") >= self.options["rate"]:
            return [text]
        one, other = sorted(int(drawn(text, cut) * (len(text) + 1)) for cut in ("one", "other"))
        return [text[:one], text[one:other], text[other:]]

    def joined(self, parts: list[Ids], text: str) -> Ids:
        """One document of the parts' ids; suffix first is written as StarCoder and most since do (the paper's SPM,
        variant 2)."""
        before, end = np.array([] if self.bos is None else [self.bos], self.dtype), np.array([self.eos], self.dtype)
        if len(parts) == 1:
            return np.concatenate([before, parts[0], end])
        prefix_mark, suffix_mark, middle_mark = np.array(self.marks, self.dtype)[:, None]
        prefix, middle, suffix = parts
        if drawn(text, "order") < self.options["suffix_first_rate"]:
            return np.concatenate([before, prefix_mark, suffix_mark, suffix, middle_mark, prefix, middle, end])
        return np.concatenate([before, prefix_mark, prefix, suffix_mark, suffix, middle_mark, middle, end])


def drawn(text: str, purpose: str) -> float:
    """A number from 0 to 1 that the text decides."""
    return xxh3_64_intdigest(f"fill in the middle {purpose}\n{text}".encode()) / 2**64


# --- encoders ---


def encoder_of(source: DocumentSource, encoder: DocumentEncoder, key: str) -> DocumentEncoder:
    """The tokenizer's encoder, as the source asks for it.

    Args:
        key: where the source stands in the recipe, for messages.

    Raises:
        RecipeError: the tokenizer has no chat template, or no marks for gaps.
    """
    if form_of_source(source) != "document":
        return ExampleEncoder(encoder, source, key)
    if source.chat is not None:
        return ChatEncoder(encoder, key)
    if isinstance(source, Source) and source.fill_in_the_middle is not None:
        return MiddleEncoder(encoder, source.fill_in_the_middle, key)
    return encoder
