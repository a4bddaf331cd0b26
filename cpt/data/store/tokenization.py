"""Encode texts as ids: BOS if the tokenizer has one, the text, EOS. Text never becomes a special token.

gigatoken is many times faster than Hugging Face's tokenizers, but does not implement every tokenizer's rules. It is
used only if it gives the same ids: documents of the run and hard strings are encoded with both. It never reads the
user's files: its readers stop silently at a bad row."""

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models
from xxhash import xxh3_128_hexdigest

from cpt.data.readers.documents import first_line
from cpt.data.store.text_loss import TextLoss, canonical, compare
from cpt.data.store.token_files import Int64
from cpt.errors import RecipeError

if TYPE_CHECKING:  # worker processes avoid importing transformers, which takes seconds
    from transformers import PreTrainedTokenizerBase

Flat = tuple[NDArray[Any], Int64]  # ids of all texts, concatenated, and the number of ids per text
Encode = Callable[[Sequence[str]], Flat]
PIECE = 50_000  # characters per text in the comparison: Hugging Face's encoder is slow

HARD_STRINGS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n \n",
    "\r\n\r\n",
    "\t\t x\t",
    " " * 300 + "x" + " " * 299,
    "\n" * 200,
    "x" * 5000,
    "ab" * 3000,
    "a \n b  \n\n   c\u00a0\u2003\u3000d\u200be\ufeff",
    "don't DON'T I'LL we've 'S 'tis it\u2019s",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-4 \u0663\u0664 \u2167 \u00bd \u00b2",
    "def f(x):\n    return {'a': [x ** 2, ...]}  # !=\n\n\n\tpass",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\dir\\file",
    "!?!?...---___***///\\\\\\ <<>> ((([[[{{{",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \ufb01 \uff21\uff11 \u212b \u0130i\u0307 \u1e9e",
    "a\u0300\u0301\u0302\u0303\u0304 \u0300 \u20dd",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd \u2764\ufe0f \U000e0041",
    "\x01\x02\x1b[0m\x7f\x80\x9f\u2028\u2029\u0085\x0b\x0c\x1c",
    "\ufffd\uffff\U0010ffff\ue000\U000f0000",
    "Stra\u00dfe \u0391\u03a3\u03a3 \u01c5 na\u00efve \u0141\u00f3d\u017a",
    "\\u0041 &amp; <p>text</p> $x^2_{i}$ |a|b|",
    "A1b2C3 camelCaseString snake_case_string SCREAMING kebab-case",
]
log = logging.getLogger("cpt")
Ids = NDArray[np.unsignedinteger]


def encode_by_gigatoken(model: str, texts: Sequence[str]) -> Flat:
    # Not `encode_batch`: its result is an awkward array, and importing awkward takes as long as encoding 60 MB.
    encode = gigatoken_of(model).encode
    parts = list(map(encode, texts))
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.concatenate([np.empty(0, np.uint32), *parts]), lengths


@lru_cache(maxsize=2)  # build a tokenizer's tables once per process
def gigatoken_of(model: str) -> Any:
    import gigatoken

    content = json.loads(model)  # encode special tokens as text, like `encode_special_tokens`
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    return gigatoken.Tokenizer.from_json(json.dumps(content))


def why_not(
    model: str, by_hugging_face: Encode, by_gigatoken: Encode, documents: Sequence[str]
) -> str | None:
    """Why gigatoken may not be used for a tokenizer and documents like these; None if all ids are equal."""
    content = json.loads(model)
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        return f"it supports byte-level BPE, not {content['model']['type']}"
    texts = [text[:PIECE] for text in (*HARD_STRINGS, *around_added_tokens(content), *documents)]
    try:
        expected = split_texts(*by_hugging_face(texts))
        ids = split_texts(*by_gigatoken(texts))
    except (RuntimeError, ValueError) as problem:  # raised for an unsupported tokenizer
        return first_line(problem)
    for text, ids_of_text, expected_ids in zip(texts, ids, expected, strict=False):
        if not np.array_equal(ids_of_text, expected_ids):
            shortened = text if len(text) <= 80 else f"{text[:60]} ..."
            return f"its ids differ for {shortened!r}"
    return None


def split_texts(ids: NDArray[Any], lengths: Int64) -> list[NDArray[Any]]:
    """The ids of each text."""
    return np.split(ids, lengths.cumsum())[: len(lengths)]


def around_added_tokens(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts that contain the added tokens, special or not: whole, doubled and truncated."""
    for added_token in content["added_tokens"][:1000]:
        token = added_token["content"]
        yield token
        yield f"a{token}b"
        yield f" {token} {token}{token}\n"
        yield f"a {token[:-1]}"
        yield f"{token.upper()} {token}s"


class DocumentEncoder:
    """Encodes documents with the tokenizer's rules, except that text never becomes a special token.

    `</s>` or `<|im_end|>` in a document is normal text: a document cannot end itself or open a chat turn. Added tokens
    that are not special (new words of a domain) are recognised as usual. The ids are Hugging Face's.

    Attributes:
        form: documents, or examples (`cpt.data.readers.columns`).
        engine: the library that computes the ids, with its version; gigatoken after `proven_for`.
        fingerprint: a hash of everything that decides the ids, so not of the engine.
        chat_template, named_tokens, control_tokens: used by `ExampleEncoder` to render chats.
    """

    form = "document"

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if tokenizer.eos_token_id is None:
            raise RecipeError(
                f"the tokenizer `{tokenizer.name_or_path}` has no end-of-sequence token, so documents would not be"
                " separated. Set `tokenizer.path` to a tokenizer that has one, or add it:"
                " tokenizer.add_special_tokens({'eos_token': ...})."
            )
        self.name = str(tokenizer.name_or_path)
        self.eos = int(tokenizer.eos_token_id)
        self.bos = int(tokenizer.bos_token_id) if adds_bos(tokenizer) else None
        self.pad = int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else self.eos
        vocabulary = tokenizer.get_vocab()
        self.dtype = np.dtype(np.uint16 if max(vocabulary.values()) < 2**16 else np.uint32)
        self.slow_tokenizer = None if tokenizer.is_fast else tokenizer
        unknown_tokens = {tokenizer.unk_token}
        if tokenizer.is_fast:
            self.engine = f"tokenizers {tokenizers.__version__}"
            # A copy: the user's tokenizer stays as it is.
            backend = copy.deepcopy(tokenizer.backend_tokenizer)
            backend.no_truncation()  # truncation would lose tokens, padding add some
            backend.no_padding()
            without_sampling(backend, self.name)
            self.model_json: str = backend.to_str()
            if isinstance(backend.model, models.BPE | models.WordLevel | models.WordPiece):
                unknown_tokens.add(backend.model.unk_token)  # the config may not name it
        else:
            self.engine = type(tokenizer).__name__
            self.model_json = json.dumps([self.engine, sorted(vocabulary.items())])
        decides = (
            f"{self.model_json} bos {self.bos} eos {self.eos} tokenizers {tokenizers.__version__}"
        )
        self.fingerprint = xxh3_128_hexdigest(decides.encode())
        self.unknown_ids = sorted(map(vocabulary.__getitem__, unknown_tokens & vocabulary.keys()))
        special_tokens = tokenizer.all_special_tokens
        special_ids = tokenizer.all_special_ids
        self.special_tokens = dict(zip(special_ids, special_tokens, strict=True))
        # The unknown token may occur in a text, unless it is also the EOS, as in GPT-2.
        if tokenizer.unk_token_id not in (self.eos, self.bos):
            self.special_tokens.pop(tokenizer.unk_token_id, None)
        self.is_special = np.zeros(max([*vocabulary.values(), *self.special_tokens]) + 1, bool)
        self.is_special[list(self.special_tokens)] = True
        edges = np.flatnonzero(np.diff(self.is_special, prepend=False, append=False)).tolist()
        self._special_ranges = list(zip(edges[::2], edges[1::2], strict=True))
        self._gigatoken: Encode | None = None
        self.chat_template = default_template(tokenizer)
        self.named_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.control_tokens = control_tokens_of(tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process builds the fast tokenizer from its JSON when needed.
        state = dict(vars(self))
        state.pop("fast_tokenizer", None)
        return state

    def proven_for(self, documents: Sequence[str]) -> "DocumentEncoder":
        """An encoder of the same ids: gigatoken's if equal on these texts and many hard strings, else this one."""
        if self.slow_tokenizer is not None:
            return self
        try:
            version = f"gigatoken {metadata.version('gigatoken')}"
        except metadata.PackageNotFoundError:
            log.info(
                "gigatoken is not installed, so Hugging Face's tokenizer is used, which is many times slower. Run: pip"
                " install gigatoken"
            )
            return self
        by_gigatoken = partial(encode_by_gigatoken, self.model_json)
        reason = why_not(self.model_json, self._by_hugging_face, by_gigatoken, documents)
        if reason is not None:
            log.info(
                f"{version} is not used for this tokenizer: {reason}. Using Hugging Face's, which is slower."
            )
            return self
        proven = copy.copy(self)
        proven.engine = version
        proven._gigatoken = by_gigatoken
        return proven

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Int64]:
        """The ids of all texts, concatenated, and the number of ids of each."""
        return self.between_bos_and_eos(*self.text_ids(texts))

    def between_bos_and_eos(self, ids: Ids, lengths: Int64) -> tuple[Ids, Int64]:
        ends = lengths.cumsum()
        if self.bos is None:
            return np.insert(ids, ends, self.eos), lengths + 1
        bounds = np.stack([ends - lengths, ends], axis=1).ravel()
        bos_and_eos = np.tile([self.bos, self.eos], len(lengths))
        return np.insert(ids, bounds, bos_and_eos), lengths + 2

    def encode_segments(self, texts: Sequence[str]) -> tuple[Ids, Int64, NDArray[np.uint8] | None]:
        return *self.encode(texts), None

    def bytes_learned(self, texts: Sequence[str], raw: Sequence[bytes]) -> Int64:
        """UTF-8 bytes of the learned part of each text, for bits per byte; for a document, all of it."""
        return np.fromiter(map(len, raw), np.int64, len(raw))

    def reason_to_drop(self, text: str) -> str | None:
        return None

    def texts_read(self, texts: Sequence[str]) -> Sequence[str]:
        """The texts that the tokenizer encodes for some documents."""
        return texts

    def text_loss(self, texts: Sequence[str]) -> TextLoss | None:
        """Encode and decode texts, and compare; None for a slow tokenizer."""
        if self.slow_tokenizer is not None:
            return None
        ids, lengths = self.text_ids(texts)
        if self._gigatoken is not None and self.decode([ids]) == ["".join(texts)]:
            return TextLoss(compared=sum(map(len, texts)))
        parts = split_texts(ids, lengths)
        is_unknown = [np.isin(part, self.unknown_ids) for part in parts]
        decoded = self.decode(
            [part[~unknown] for part, unknown in zip(parts, is_unknown, strict=True)]
        )
        normaliser = self.fast_tokenizer.normalizer
        total = TextLoss(compared=0)
        for text, decoded_text, unknown in zip(texts, decoded, is_unknown, strict=True):
            if decoded_text == text or canonical(decoded_text) == canonical(text):
                loss = TextLoss(compared=len(text))
            else:
                normalised = text if normaliser is None else normaliser.normalize_str(text)
                loss = compare(text, decoded_text, normalised, has_unknown=bool(unknown.any()))
            total = total.add(loss)
        return total

    def decode(self, parts: Sequence[Ids]) -> list[str]:
        if self._gigatoken is not None:
            decode = gigatoken_of(self.model_json).decode
            return [decode(part.astype(np.uint32)).decode(errors="replace") for part in parts]
        ids = [part.tolist() for part in parts]
        return self.fast_tokenizer.decode_batch(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self.fast_tokenizer.token_to_id(token) if self.slow_tokenizer is None else None

    def decode_documents(self, ids: Ids, offsets: Int64) -> list[str]:
        """The texts of documents, without special tokens."""
        parts = [part.tolist() for part in np.split(ids, offsets[1:-1])]
        if self.slow_tokenizer is not None:
            return self.slow_tokenizer.batch_decode(parts, skip_special_tokens=True)
        return self.fast_tokenizer.decode_batch(parts)

    def _encode_batch(self, texts: Sequence[str]) -> Flat:
        if self._gigatoken is not None:
            return self._gigatoken(texts)
        return self._by_hugging_face(texts)

    def _by_hugging_face(self, texts: Sequence[str]) -> Flat:
        if self.slow_tokenizer is None:
            encodings = self.fast_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            parts = [np.array(encoding.ids, self.dtype) for encoding in encodings]
        else:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            encoded = self.slow_tokenizer(list(texts), **options)["input_ids"] if texts else []
            parts = [np.array(ids, self.dtype) for ids in encoded]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        return np.concatenate([np.empty(0, self.dtype), *parts]), lengths

    @cached_property
    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        fast = tokenizers.Tokenizer.from_str(self.model_json)
        fast.encode_special_tokens = True  # not stored in the JSON
        if fast.decoder is None and '"ByteLevel"' in self.model_json:
            fast.decoder = decoders.ByteLevel()  # a file may lack it; the tokens have the text
        return fast

    def text_ids(self, texts: Sequence[str]) -> tuple[Ids, Int64]:
        """Encode without BOS and EOS; special ids in text (SentencePiece's `</s>`) become those of the spelling."""
        ids, lengths = self._encode_batch(texts)
        ids = ids.astype(self.dtype, copy=False)
        if not self.has_special(ids):
            return ids, lengths
        positions = np.flatnonzero(self.is_special[ids])
        tokens = [self.special_tokens[number] for number in ids[positions].tolist()]
        spellings = [np.array(self.spelling_of(token), self.dtype) for token in tokens]
        text_of_position = np.searchsorted(lengths.cumsum(), positions, side="right")
        lengths = lengths.copy()
        np.add.at(lengths, text_of_position, [len(spelling) - 1 for spelling in spellings])
        parts = []
        begin = 0
        for position, spelling in zip(positions.tolist(), spellings, strict=True):
            parts += [ids[begin:position], spelling]
            begin = position + 1
        return np.concatenate([*parts, ids[begin:]]), lengths

    def has_special(self, ids: Ids) -> bool:
        """Most texts have no special ids, and comparing is ten times faster than a look-up."""
        return any(
            np.any(ids - ids.dtype.type(first) < last - first)
            for first, last in self._special_ranges
        )

    def spelling_of(self, token: str) -> list[int]:
        if len(token) < 2:
            raise RecipeError(
                f"the tokenizer has the special token `{token}`, a single character, so text cannot be"
                " distinguished from it. Choose another tokenizer."
            )
        half = len(token) // 2
        ids: list[int] = []
        for part in (token[:half], token[half:]):
            part_ids, _ = self._encode_batch([part])
            if self.is_special[part_ids].any():
                ids += self.spelling_of(part)
            else:
                ids += part_ids.tolist()
        return ids


def without_sampling(backend: tokenizers.Tokenizer, name: str) -> None:
    """Make the tokenizer give a text the same tokens each time, as stored tokens and resuming need it."""
    model = backend.model
    switched_off = ""
    if isinstance(model, models.BPE) and model.dropout:
        switched_off = f"BPE dropout ({model.dropout:.3g})"
        model.dropout = None
    elif isinstance(model, models.Unigram) and (model.alpha or model.nbest_size):
        switched_off = f"sampling (alpha {model.alpha}, nbest_size {model.nbest_size})"
        model.alpha = model.nbest_size = None
    if switched_off:
        log.warning(
            f"the tokenizer `{name}` gives a text other tokens each time: its {switched_off} is switched off."
        )


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer puts its BOS before a text."""
    with_special: list[int] = tokenizer("a")["input_ids"]  # type: ignore[assignment]
    without: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    bos = tokenizer.bos_token_id
    return bos is not None and with_special[:1] == [bos] and without[:1] != [bos]


def default_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template


def control_tokens_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Special token -> its id."""
    control_tokens = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            control_tokens[token.content] = number
    special_ids = tokenizer.all_special_ids
    control_tokens.update(zip(tokenizer.all_special_tokens, special_ids, strict=True))
    return control_tokens
