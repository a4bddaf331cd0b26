"""Encode examples as ids, with the segment of each token (context, learned, unwanted), and documents with gaps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
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

CONTEXT = 0  # a token of the prompt
LEARNED = 1
UNWANTED = 2  # rejected
ROW = 3  # a byte of the file's row
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
    documents: StoredDocuments, numbers: Int64, form: str, sequence_length: int
) -> Fitting:
    """Select the documents of these numbers that fit. A document is never cut, an example is truncated at its end. A
    conversation needs a learned token after its first one; other forms need space for a completion or the prompt."""
    lengths = np.diff(documents.offsets)[numbers]
    if form == "document":
        return Fitting(numbers, lengths, lengths, {})
    parts = [part for part in documents.parts if part.description.documents]
    if form == "conversation":
        learns = [np.empty(0, bool)]
        learns += [has_learned_token(part, sequence_length) for part in parts]
        fits = np.concatenate(learns)[numbers]
        reason = NOTHING_LEARNED
        lengths = tokens = np.minimum(lengths, sequence_length)
    else:
        counts = [np.empty(0, np.int64)]
        counts += list(map(count_context, parts))
        prompt_lengths = np.concatenate(counts)[numbers]
        is_prompt_only = form == "prompt"
        longest_prompt = sequence_length if is_prompt_only else sequence_length - 1
        fits = prompt_lengths <= longest_prompt
        reason = LONG_PROMPT
        tokens = prompt_lengths if is_prompt_only else lengths
    left_out = {} if fits.all() else {reason: int((~fits).sum())}
    return Fitting(numbers[fits], lengths[fits], tokens[fits], left_out)


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
            raise RecipeError(
                f"`{key}`: the tokenizer `{encoder.name}` is a slow (Python) tokenizer, which lacks character offsets."
                " Set `tokenizer.path` to a tokenizer with a tokenizer.json."
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
        decides = [
            encoder.fingerprint,
            self.form,
            self.template,
            sorted(self.named_tokens.items()),
            VERSION,
        ]
        self.fingerprint = xxh3_128_hexdigest(json.dumps(decides).encode())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("whole_tokenizer", "writer"):  # built again when needed
            state.pop(name, None)
        return state

    @cached_property
    def writer(self) -> ExampleWriter:
        named = {}
        for name, token in self.named_tokens.items():
            if isinstance(token, str):
                named[name] = token
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
        examples = list(map(self.write, texts))
        tokens = iter(self.tokenize(list(chain.from_iterable(examples))))
        ids = [np.empty(0, self.dtype)]
        segments = [np.empty(0, np.uint8)]
        for text, sequences in zip(texts, examples, strict=True):
            tokens_of_sequences = list(islice(tokens, len(sequences)))
            example_ids, example_segments = self.example_ids(text, sequences, tokens_of_sequences)
            ids.append(example_ids)
            segments.append(example_segments)
        lengths = np.array(list(map(len, ids[1:])), np.int64)
        all_ids = np.concatenate(ids, dtype=self.dtype)
        return all_ids, lengths, np.concatenate(segments, dtype=np.uint8)

    def bytes_learned(self, texts: Sequence[str], raw: Sequence[bytes]) -> Int64:
        """UTF-8 bytes of a conversation's answers without control tokens; 1 if they are empty, as the end has bits."""
        if self.form != "conversation":
            return super().bytes_learned(texts, raw)
        counts = []
        for text in texts:
            (rendered,) = self.write(text)
            num_bytes = 0
            for start, end in rendered.spans:
                learned = self.without_control(rendered.text[start:end], is_chat=rendered.is_chat)
                num_bytes += len(learned.encode())
            counts.append(max(1, num_bytes))
        return np.array(counts, np.int64)

    def texts_read(self, texts: Sequence[str]) -> Sequence[str]:
        """The rendered examples without control tokens."""
        rendered = chain.from_iterable(map(self.write, texts))
        return [self.without_control(written.text, is_chat=written.is_chat) for written in rendered]

    def without_control(self, text: str, *, is_chat: bool) -> str:
        if is_chat:
            text = self.writer.control.sub("", text)
        return text.replace(NOT_TOKEN, "")

    def write(self, text: str) -> list[Written]:
        try:
            return self.writer.write(text)
        except Refused as problem:
            raise DataError(
                f"an example cannot be rendered: {problem}. It begins: {text[:80]!r}"
            ) from problem

    def example_ids(
        self, text: str, sequences: Sequence[Written], tokens: Sequence[Tokens]
    ) -> tuple[Ids, Segments]:
        """The ids of an example and the segment of each; of a preference, `sequences` are chosen and rejected."""
        ids, is_learned = self.with_bos_and_eos(sequences[0], tokens[0])
        if self.form == "document":  # a chat, learned completely
            return ids, np.full(len(ids), LEARNED, np.uint8)
        if self.form == "conversation":
            return ids, is_learned.astype(np.uint8)
        if self.form == "preference":
            rejected, is_rejected_learned = self.with_bos_and_eos(sequences[1], tokens[1])
            # The prompt once, as far as both share ids, then the chosen and the rejected completion.
            prompt_length = min(
                common_length(ids, rejected),
                first_learned(is_learned),
                first_learned(is_rejected_learned),
            )
            return in_segments(
                {
                    CONTEXT: ids[:prompt_length],
                    LEARNED: ids[prompt_length:],
                    UNWANTED: rejected[prompt_length:],
                }
            )
        example = example_of(text)
        assert example is not None
        if self.form == "unpaired":
            segment = LEARNED if example.label else UNWANTED
            return ids, np.where(is_learned, segment, CONTEXT).astype(np.uint8)
        row = {"prompt": example.prompt, **(example.columns or {})}
        row_bytes = np.frombuffer(json.dumps(row, ensure_ascii=False).encode(), np.uint8)
        return in_segments({CONTEXT: ids, ROW: row_bytes.astype(self.dtype)})

    def with_bos_and_eos(self, rendered: Written, tokens: Tokens) -> tuple[Ids, Mask]:
        """Add BOS and EOS, unless they are there; also return whether each token is learned."""
        ids = tokens.ids
        is_learned = learned_tokens(tokens, rendered)
        has_bos = rendered.is_chat and ids[:1].tolist() == [self.bos]
        if self.bos is not None and not has_bos:
            ids = np.insert(ids, 0, self.bos)
            is_learned = np.insert(is_learned, 0, False)
        has_eos = rendered.is_chat and rendered.text.rstrip().endswith(
            self.named_tokens["eos_token"]
        )
        if self.form != "prompt" and not has_eos:
            ids = np.append(ids, self.dtype.type(self.eos))
            is_learned = np.append(is_learned, rendered.learns_end)
        return ids, is_learned

    def tokenize(self, texts: Sequence[Written]) -> list[Tokens]:
        """The tokens of rendered texts. A text with escaped control tokens, or without a template, is tokenised in
        pieces, so that its words never become control tokens."""
        whole_texts: list[str] = []
        pieces_of: list[list[str]] = []  # of each text; empty for a whole one
        text_pieces: list[str] = []
        for rendered in texts:
            pieces: list[str] = []
            if rendered.is_chat and NOT_TOKEN not in rendered.text:
                whole_texts.append(rendered.text)
            else:
                pieces = self.pieces(rendered)
                text_pieces += pieces[::2]
            pieces_of.append(pieces)
        whole_encodings = iter(
            self.whole_tokenizer.encode_batch(whole_texts, add_special_tokens=False)
        )
        piece_encodings = iter(
            self.fast_tokenizer.encode_batch(text_pieces, add_special_tokens=False)
        )
        tokens = []
        for pieces in pieces_of:
            if pieces:
                tokens.append(self.tokens_of_pieces(pieces, piece_encodings))
            else:
                tokens.append(self.as_tokens(next(whole_encodings), 0))
        return tokens

    def pieces(self, rendered: Written) -> list[str]:
        """Alternating: text, control token, text, ..., text; without a template it is one text."""
        pieces = self.writer.control.split(rendered.text) if rendered.is_chat else [rendered.text]
        return [piece.replace(NOT_TOKEN, "") for piece in pieces]

    def tokens_of_pieces(
        self, pieces: Sequence[str], encodings: Iterator[tokenizers.Encoding]
    ) -> Tokens:
        """`encodings`: the next ones are of the texts among the pieces."""
        parts: list[Tokens] = []
        start = 0
        for number, piece in enumerate(pieces):
            end = start + len(piece)
            if number % 2:
                control_id = np.array([self.control_tokens[piece]], self.dtype)
                parts.append(Tokens(control_id, np.array([start]), np.array([end])))
            else:
                parts.append(self.without_special(self.as_tokens(next(encodings), start)))
            start = end
        return Tokens(
            ids=np.concatenate([part.ids for part in parts]),
            starts=np.concatenate([part.starts for part in parts]),
            ends=np.concatenate([part.ends for part in parts]),
        )

    def as_tokens(self, encoding: tokenizers.Encoding, start: int) -> Tokens:
        """The tokens of a text that begins at a character."""
        ids = np.array(encoding.ids, self.dtype)
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids))
        offsets += start
        return Tokens(ids, offsets[::2], offsets[1::2])

    def without_special(self, tokens: Tokens) -> Tokens:
        """Replace special ids that are text by the ids of their spelling."""
        if not self.is_special[tokens.ids].any():
            return tokens
        ids: list[int] = []
        counts = []  # of the ids for each token
        for token_id in tokens.ids.tolist():
            special_token = self.special_tokens.get(token_id)
            spelling = [token_id] if special_token is None else self.spelling_of(special_token)
            ids += spelling
            counts.append(len(spelling))
        return Tokens(
            ids=np.array(ids, self.dtype),
            starts=np.repeat(tokens.starts, counts),
            ends=np.repeat(tokens.ends, counts),
        )

    @cached_property
    def whole_tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.model_json)


def common_length(chosen: Ids, rejected: Ids) -> int:
    """The number of ids that both begin with; something of each remains."""
    shortest = min(len(chosen), len(rejected))
    differences = np.flatnonzero(chosen[:shortest] != rejected[:shortest])
    return int(differences[0]) if len(differences) else shortest - 1


def first_learned(is_learned: Mask) -> int:
    return int(np.argmax(is_learned)) if is_learned.any() else len(is_learned)


def in_segments(parts: Mapping[int, Ids]) -> tuple[Ids, Segments]:
    """The ids of the parts, and the segment of each id."""
    lengths = list(map(len, parts.values()))
    segments = np.repeat(np.array(list(parts), np.uint8), lengths)
    return np.concatenate(list(parts.values())), segments


def learned_tokens(tokens: Tokens, rendered: Written) -> Mask:
    """Mark tokens whose first non-blank character is in a span, or any character (`by_overlap`). So an answer's first
    word is learned whether the blank before it is in the prompt or in the answer."""
    if not rendered.spans:
        return np.zeros(len(tokens.ids), bool)
    bounds = np.array(rendered.spans).ravel()
    if NOT_TOKEN in rendered.text:  # the escape character is not tokenised
        bounds -= [rendered.text.count(NOT_TOKEN, 0, end) for end in bounds.tolist()]
    starts = bounds[::2]
    ends = bounds[1::2]
    if rendered.by_overlap:
        span = np.searchsorted(starts, tokens.ends, "left") - 1
        return (span >= 0) & (tokens.starts < ends[span])
    span = np.searchsorted(starts, tokens.starts, "right") - 1
    is_learned: Mask = (span >= 0) & (tokens.starts < ends[span])
    text = rendered.text.replace(NOT_TOKEN, "")
    tokens_before = np.searchsorted(tokens.starts, starts) - 1
    for start, token in zip(starts.tolist(), tokens_before.tolist(), strict=True):
        reaches_into_span = token >= 0 and tokens.ends[token] > start
        if reaches_into_span and text[tokens.starts[token] : start].isspace():
            is_learned[token] = True
    return is_learned


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
        self.marks = find_marks(encoder)
        if not self.marks:
            possible_marks = "; ".join(map(" ".join, MARKS))
            raise RecipeError(
                f"`{key}.fill_in_the_middle`: the tokenizer `{encoder.name}` lacks the tokens for it (known:"
                f" {possible_marks}). Remove the key, or add such tokens to the tokenizer."
            )
        self.fingerprint = xxh3_128_hexdigest(
            f"{encoder.fingerprint} {self.marks} {self.options}".encode()
        )

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Int64]:
        parts_of = list(map(self.cut, texts))
        ids, lengths = self.text_ids(list(chain.from_iterable(parts_of)))
        part_ids = iter(np.split(ids, lengths.cumsum()[:-1]))
        documents = [np.empty(0, self.dtype)]
        for text, parts in zip(texts, parts_of, strict=True):
            documents.append(self.join(list(islice(part_ids, len(parts))), text))
        lengths = np.array(list(map(len, documents[1:])), np.int64)
        return self.between_bos_and_eos(np.concatenate(documents), lengths)

    def cut(self, text: str) -> list[str]:
        if draw(text, "rate") >= self.options["rate"]:
            return [text]
        num_positions = len(text) + 1
        first_cut = int(draw(text, "one") * num_positions)
        second_cut = int(draw(text, "other") * num_positions)
        begin, end = sorted((first_cut, second_cut))
        return [text[:begin], text[begin:end], text[end:]]

    def join(self, parts: list[Ids], text: str) -> Ids:
        """Join the parts to one document; suffix first as in StarCoder and later models (SPM variant 2)."""
        if len(parts) == 1:
            return parts[0]
        prefix_mark, suffix_mark, middle_mark = np.array(self.marks, self.dtype)[:, None]
        prefix, middle, suffix = parts
        if draw(text, "order") < self.options["suffix_first_rate"]:
            return np.concatenate([prefix_mark, suffix_mark, suffix, middle_mark, prefix, middle])
        return np.concatenate([prefix_mark, prefix, suffix_mark, suffix, middle_mark, middle])


def find_marks(encoder: DocumentEncoder) -> list[int]:
    """The ids of the first marks that the tokenizer has all of."""
    for marks in MARKS:
        ids = [number for number in map(encoder.id_of, marks) if number is not None]
        if len(ids) == len(marks):
            return ids
    return []


def draw(text: str, purpose: str) -> float:
    """A number from 0 to 1 that depends on the text only."""
    return xxh3_64_intdigest(f"fill in the middle {purpose}\n{text}".encode()) / 2**64


def encoder_of(source: DocumentSource, encoder: DocumentEncoder, key: str) -> DocumentEncoder:
    if source.chat is not None:  # also set for examples
        return ExampleEncoder(encoder, source, key)
    if isinstance(source, Source) and source.fill_in_the_middle is not None:
        return MiddleEncoder(encoder, source.fill_in_the_middle, key)
    return encoder
