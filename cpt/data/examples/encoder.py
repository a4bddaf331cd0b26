"""Encode examples as ids, with the segment of each token (context, learned, unwanted), and documents with gaps."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.data.examples.chat_template import SAME_DAY, ExampleWriter, Refused, Written
from cpt.data.readers.columns import form_of_source
from cpt.data.readers.example import NOT_TOKEN, example_of
from cpt.data.store.token_files import Int64, Mask, StoredDocuments, TokenFiles
from cpt.data.store.tokenization import DocumentEncoder, Ids
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import DocumentSource, Source

CONTEXT, LEARNED, UNWANTED, ROW = 0, 1, 2, 3  # prompt; learned; rejected; a byte of the row
Segments = NDArray[np.uint8]
NOTHING_LEARNED = "nothing to learn within sequence_length"
LONG_PROMPT = "prompt longer than sequence_length"
VERSION = 3  # incremented when ids, segments or bytes of examples change


class Fitting(NamedTuple):
    """The chosen documents that fit into a row."""

    numbers: Int64
    lengths: Int64  # stored ids of each in its row
    tokens: Int64  # that the model reads of each
    left_out: dict[str, int]  # reason -> documents that do not fit


def select_fitting(
    documents: StoredDocuments, chosen: Int64, form: str, sequence_length: int
) -> Fitting:
    """Select the chosen documents that fit. A document is never cut, an example is truncated at its end. A
    conversation needs a learned token after its first one; other forms need space for a completion or the prompt."""
    lengths = np.diff(documents.offsets)[chosen]
    if form == "document":
        return Fitting(chosen, lengths, lengths, {})
    parts = [part for part in documents.parts if part.description.documents]
    if form == "conversation":
        learns = [np.empty(0, bool)]
        learns += [has_learned_token(part, sequence_length) for part in parts]
        fits = np.concatenate(learns)[chosen]
        reason = NOTHING_LEARNED
        lengths = tokens = np.minimum(lengths, sequence_length)
    else:
        counts = [np.empty(0, np.int64)]
        counts += [count_context(part) for part in parts]
        prompt_lengths = np.concatenate(counts)[chosen]
        is_prompt_only = form == "prompt"
        longest_prompt = sequence_length if is_prompt_only else sequence_length - 1
        fits = prompt_lengths <= longest_prompt
        reason = LONG_PROMPT
        tokens = prompt_lengths if is_prompt_only else lengths
    left_out = {} if fits.all() else {reason: int((~fits).sum())}
    return Fitting(chosen[fits], lengths[fits], tokens[fits], left_out)


def has_learned_token(part: TokenFiles, sequence_length: int) -> Mask:
    """Whether each document has a learned token among its first `sequence_length`, except the very first."""
    begins = part.offsets[:-1]
    ends = part.offsets[1:]
    row_ends = np.minimum(ends, begins + sequence_length)
    bounds = np.stack([np.minimum(begins + 1, ends - 1), row_ends], axis=1).ravel()
    # Every second range of `bounds` is a document; the highest segment of a conversation is LEARNED.
    highest = np.maximum.reduceat(np.append(part.segments, np.uint8(CONTEXT)), bounds)[::2]
    learns: Mask = (highest == LEARNED) & (row_ends - begins > 1)
    return learns


def count_context(part: TokenFiles) -> Int64:
    """The tokens of each example's prompt."""
    counts: Int64 = np.add.reduceat(part.segments == CONTEXT, part.offsets[:-1], dtype=np.int64)
    return counts


class Tokens(NamedTuple):
    ids: Ids
    starts: Int64  # character offsets in the text
    ends: Int64


class ExampleEncoder(DocumentEncoder):
    """Encodes examples to exactly the ids that transformers gives for the rendered chat template. BOS comes first if
    the tokenizer adds one, and EOS last, unless the template wrote them already."""

    def __init__(self, encoder: DocumentEncoder, source: DocumentSource, key: str) -> None:
        vars(self).update(vars(encoder))
        if encoder.slow_tokenizer is not None:
            slow = f"the tokenizer `{encoder.name}` is a slow (Python) tokenizer, which lacks character offsets"
            raise RecipeError(
                f"`{key}`: {slow}. Set `tokenizer.path` to a tokenizer with a tokenizer.json."
            )
        self.form = form_of_source(source)
        self.template = encoder.chat_template
        if self.template is not None and "strftime_now" in self.template:
            self.template = SAME_DAY + self.template
        self._gigatoken = None
        if self.form == "document" and self.template is None:
            raise RecipeError(
                f"`{key}.chat`: the tokenizer `{encoder.name}` has no chat template. Set `tokenizer.path` to that of"
                " the model's chat version, or write the chat as text into a column: `text_column`."
            )
        what = [
            encoder.fingerprint,
            self.form,
            self.template,
            sorted(self.named_tokens.items()),
            VERSION,
        ]
        self.fingerprint = xxh3_128_hexdigest(json.dumps(what).encode())

    def __getstate__(self) -> dict[str, Any]:
        made_again = ("whole_tokenizer", "writer")
        return {
            name: value for name, value in super().__getstate__().items() if name not in made_again
        }

    @cached_property
    def writer(self) -> ExampleWriter:
        named = {name: token for name, token in self.named_tokens.items() if isinstance(token, str)}
        return ExampleWriter(self.form, self.template, named, sorted(self.control_tokens))

    def reason_to_drop(self, text: str) -> str | None:
        try:
            self.writer.write(text)
        except Refused as problem:
            return str(problem)
        return None

    def proven_for(self, documents: Sequence[str]) -> "ExampleEncoder":
        return self  # gigatoken does not report character offsets

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Int64]:
        return self.encode_segments(texts)[:2]

    def encode_segments(self, texts: Sequence[str]) -> tuple[Ids, Int64, Segments]:
        written = [self.write(text) for text in texts]
        tokens = iter(self.tokenize([one for some in written for one in some]))
        pairs = zip(texts, written, strict=True)
        parts = [
            self.example_ids(text, [(one, next(tokens)) for one in some]) for text, some in pairs
        ]
        ids = np.concatenate(
            [np.empty(0, self.dtype), *(ids for ids, _ in parts)], dtype=self.dtype
        )
        segments = np.concatenate(
            [np.empty(0, np.uint8), *(segments for _, segments in parts)], dtype=np.uint8
        )
        return ids, np.array([len(ids) for ids, _ in parts], np.int64), segments

    def bytes_learned(self, texts: Sequence[str], raw: Sequence[bytes]) -> Int64:
        """UTF-8 bytes of a conversation's answers without control tokens; 1 if they are empty, as the end has bits."""
        if self.form != "conversation":
            return super().bytes_learned(texts, raw)
        counts = []
        for (one,) in map(self.write, texts):
            learned = [one.text[start:end] for start, end in one.spans]
            learned = [
                self.writer.control.sub("", text) if one.is_chat else text for text in learned
            ]
            counts.append(
                max(1, sum(len(text.replace(NOT_TOKEN, "").encode()) for text in learned))
            )
        return np.array(counts, np.int64)

    def texts_read(self, texts: Sequence[str]) -> Sequence[str]:
        """The rendered examples without control tokens."""
        rendered = [one for text in texts for one in self.write(text)]
        return [
            (self.writer.control.sub("", one.text) if one.is_chat else one.text).replace(
                NOT_TOKEN, ""
            )
            for one in rendered
        ]

    def write(self, text: str) -> list[Written]:
        try:
            return self.writer.write(text)
        except Refused as problem:
            raise DataError(
                f"an example cannot be rendered: {problem}. It begins: {text[:80]!r}"
            ) from problem

    def example_ids(
        self, text: str, sequences: Sequence[tuple[Written, Tokens]]
    ) -> tuple[Ids, Segments]:
        framed = [self.with_bos_and_eos(written, tokens) for written, tokens in sequences]
        if self.form == "preference":
            # The prompt once, as far as both share ids, then the chosen and the rejected completion.
            chosen, rejected = (ids for ids, _ in framed)
            shortest = min(len(chosen), len(rejected))
            differ = np.flatnonzero(chosen[:shortest] != rejected[:shortest])
            same = int(differ[0]) if len(differ) else shortest - 1
            prompt = min(
                same,
                *(
                    int(np.argmax(learned)) if learned.any() else len(learned)
                    for _, learned in framed
                ),
            )
            parts = [chosen[:prompt], chosen[prompt:], rejected[prompt:]]
            segments = np.array([CONTEXT, LEARNED, UNWANTED], np.uint8)
            return np.concatenate(parts), np.repeat(segments, [len(part) for part in parts])
        ((ids, learned),) = framed
        if self.form == "document":  # a chat, learned completely
            return ids, np.full(len(ids), LEARNED, np.uint8)
        if self.form == "conversation":
            return ids, learned.astype(np.uint8)
        example = example_of(text)
        assert example is not None
        if self.form == "unpaired":
            return ids, np.where(learned, LEARNED if example.label else UNWANTED, CONTEXT).astype(
                np.uint8
            )
        row = json.dumps(
            {"prompt": example.prompt, **(example.columns or {})}, ensure_ascii=False
        ).encode()
        both = np.concatenate([ids, np.frombuffer(row, np.uint8).astype(self.dtype)])
        return both, np.repeat(np.array([CONTEXT, ROW], np.uint8), [len(ids), len(row)])

    def with_bos_and_eos(self, written: Written, tokens: Tokens) -> tuple[Ids, Mask]:
        """Add BOS and EOS, unless they are there; also return whether each token is learned."""
        ids, learned = tokens.ids, learned_tokens(tokens, written)
        before = (
            []
            if self.bos is None or written.is_chat and ids[:1].tolist() == [self.bos]
            else [self.bos]
        )
        has_eos = written.is_chat and written.text.rstrip().endswith(self.named_tokens["eos_token"])
        after = [self.eos] if self.form != "prompt" and not has_eos else []
        return (
            np.concatenate([np.array(before, self.dtype), ids, np.array(after, self.dtype)]),
            np.concatenate(
                [np.zeros(len(before), bool), learned, np.full(len(after), written.learns_end)]
            ),
        )

    def tokenize(self, written: Sequence[Written]) -> list[Tokens]:
        whole = [
            number
            for number, one in enumerate(written)
            if one.is_chat and NOT_TOKEN not in one.text
        ]
        texts = [written[number].text for number in whole]
        encodings = self.whole_tokenizer.encode_batch(texts, add_special_tokens=False)
        found = {
            number: self.as_tokens(encoding, 0)
            for number, encoding in zip(whole, encodings, strict=True)
        }
        # Alternating: text, control token, text, ..., text; without a template it is one text.
        pieces: dict[int, list[str]] = {}
        for number, one in enumerate(written):
            if number not in found:
                some = self.writer.control.split(one.text) if one.is_chat else [one.text]
                pieces[number] = [piece.replace(NOT_TOKEN, "") for piece in some]
        texts = [piece for some in pieces.values() for piece in some[::2]]
        others = iter(self.fast_tokenizer.encode_batch(texts, add_special_tokens=False))
        for number, some in pieces.items():
            at, parts = 0, list[Tokens]()
            for place, piece in enumerate(some):
                if place % 2:
                    ids = np.array([self.control_tokens[piece]], self.dtype)
                    parts.append(Tokens(ids, np.array([at]), np.array([at + len(piece)])))
                else:
                    parts.append(self.without_special(self.as_tokens(next(others), at)))
                at += len(piece)
            found[number] = Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        return [found[number] for number in range(len(written))]

    def as_tokens(self, encoding: tokenizers.Encoding, at: int) -> Tokens:
        offsets = (
            np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding.ids)) + at
        )
        return Tokens(np.array(encoding.ids, self.dtype), offsets[::2], offsets[1::2])

    def without_special(self, tokens: Tokens) -> Tokens:
        """Replace special ids that are text by the ids of their spelling."""
        found = np.flatnonzero(self.is_special[tokens.ids])
        if not len(found):
            return tokens
        spelled = {
            at: self.spelling_of(self.special_tokens[int(tokens.ids[at])]) for at in found.tolist()
        }
        ids = [spelled.get(at, [number]) for at, number in enumerate(tokens.ids.tolist())]
        counts = [len(some) for some in ids]
        flat = np.array(list(chain.from_iterable(ids)), self.dtype)
        return Tokens(flat, np.repeat(tokens.starts, counts), np.repeat(tokens.ends, counts))

    @cached_property
    def whole_tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.model_json)


def learned_tokens(tokens: Tokens, written: Written) -> Mask:
    """Mark tokens whose first non-blank character is in a span, or any character (`by_overlap`). So an answer's first
    word is learned whether the blank before it is in the prompt or in the answer."""
    if not written.spans:
        return np.zeros(len(tokens.ids), bool)
    spans = np.array(written.spans)
    if NOT_TOKEN in written.text:  # the escape character is not tokenised
        spans -= [[written.text.count(NOT_TOKEN, 0, end) for end in span] for span in written.spans]
    starts, ends = spans.T
    if written.by_overlap:
        span = np.searchsorted(starts, tokens.ends, "left") - 1
        return (span >= 0) & (tokens.starts < ends[span])
    span = np.searchsorted(starts, tokens.starts, "right") - 1
    begins = (span >= 0) & (tokens.starts < ends[span])
    text = written.text.replace(NOT_TOKEN, "")
    for start, token in zip(
        starts.tolist(), (np.searchsorted(tokens.starts, starts) - 1).tolist(), strict=True
    ):
        if (
            token >= 0
            and tokens.ends[token] > start
            and text[tokens.starts[token] : start].isspace()
        ):
            begins[token] = True
    return begins


MARKS = [  # tokens before the prefix, the suffix and the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
]


class MiddleEncoder(DocumentEncoder):
    """Encodes a share of the documents as prefix, suffix, middle, or as suffix, prefix, middle. The hash of a text
    decides whether and where it is cut: between any two characters, as in an editor."""

    def __init__(self, encoder: DocumentEncoder, options: Mapping[Any, float], key: str) -> None:
        vars(self).update(vars(encoder))
        self.options = {"rate": 0.5, "suffix_first_rate": 0.5, **options}
        ids = [[encoder.id_of(mark) for mark in marks] for marks in MARKS]
        self.marks = next(
            ([id_ for id_ in found if id_ is not None] for found in ids if None not in found), []
        )
        if not self.marks:
            known = "; ".join(" ".join(marks) for marks in MARKS)
            raise RecipeError(
                f"`{key}.fill_in_the_middle`: the tokenizer `{encoder.name}` lacks the tokens for it (known: {known})."
                " Remove the key, or add such tokens to the tokenizer."
            )
        self.fingerprint = xxh3_128_hexdigest(
            f"{encoder.fingerprint} {self.marks} {self.options}".encode()
        )

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Int64]:
        parts = [self.parts_of(text) for text in texts]
        ids, lengths = self.text_ids([part for some in parts for part in some])
        each = iter(np.split(ids, lengths.cumsum()[:-1]))
        documents = [
            self.joined([next(each) for _ in some], text)
            for some, text in zip(parts, texts, strict=True)
        ]
        lengths = np.array([len(ids) for ids in documents], np.int64)
        return self.between_bos_and_eos(
            np.concatenate([np.empty(0, self.dtype), *documents]), lengths
        )

    def parts_of(self, text: str) -> list[str]:
        if drawn(text, "rate") >= self.options["rate"]:
            return [text]
        one, other = sorted(int(drawn(text, cut) * (len(text) + 1)) for cut in ("one", "other"))
        return [text[:one], text[one:other], text[other:]]

    def joined(self, parts: list[Ids], text: str) -> Ids:
        """Join the parts to one document; suffix first as in StarCoder and later models (SPM variant 2)."""
        if len(parts) == 1:
            return parts[0]
        prefix_mark, suffix_mark, middle_mark = np.array(self.marks, self.dtype)[:, None]
        prefix, middle, suffix = parts
        if drawn(text, "order") < self.options["suffix_first_rate"]:
            return np.concatenate([prefix_mark, suffix_mark, suffix, middle_mark, prefix, middle])
        return np.concatenate([prefix_mark, prefix, suffix_mark, suffix, middle_mark, middle])


def drawn(text: str, purpose: str) -> float:
    return xxh3_64_intdigest(f"fill in the middle {purpose}\n{text}".encode()) / 2**64


def encoder_of(source: DocumentSource, encoder: DocumentEncoder, key: str) -> DocumentEncoder:
    if source.chat is not None:  # also set for examples
        return ExampleEncoder(encoder, source, key)
    if isinstance(source, Source) and source.fill_in_the_middle is not None:
        return MiddleEncoder(encoder, source.fill_in_the_middle, key)
    return encoder
