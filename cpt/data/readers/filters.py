"""Built-in filters and transforms, and building the functions that a recipe lists.

A filter returns the reason to drop a document, or None to keep it. A transform returns the document changed, or a list
of documents."""

import gzip
import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from cpt.data.readers.comparing import FIRST_COMPARISON
from cpt.data.readers.decontamination import decontaminate, key_options
from cpt.data.readers.documents import Document, DocumentView
from cpt.errors import RecipeError, ResourceError, UserCodeError, install_line
from cpt.plugins import check_options, did_you_mean, find
from cpt.recipe.schema import Component, Data, DocumentSource, Source


def length(
    document: DocumentView,
    *,
    min_characters: int = 0,
    max_characters: int | None = None,
    min_words: int = 0,
    max_words: int | None = None,
) -> str | None:
    """Drop documents that are too short or too long, in characters or in whitespace-separated words."""
    size = len(document["text"])
    if size < min_characters:
        return f"shorter than {min_characters} characters"
    if max_characters is not None and size > max_characters:
        return f"longer than {max_characters} characters"
    if not min_words and max_words is None:
        return None
    words = len(document["text"].split())
    if words < min_words:
        return f"fewer than {min_words} words"
    if max_words is not None and words > max_words:
        return f"more than {max_words} words"
    return None


def pattern(
    document: DocumentView, *, drop: str | None = None, require: str | None = None
) -> str | None:
    """Drop documents that match the regular expression `drop`, or that do not match `require`."""
    if drop is None and require is None:
        raise RecipeError("the filter `pattern` needs `drop` or `require`, a regular expression.")
    try:
        if drop is not None and re.search(drop, document["text"]):
            return f"matches {drop}"
        if require is not None and not re.search(require, document["text"]):
            return f"does not match {require}"
    except re.error as problem:
        problem_text = f"`{problem.pattern!s}` is not a regular expression"
        raise RecipeError(f"the filter `pattern`: {problem_text}: {problem.msg}.") from problem
    return None


def keep_share(document: DocumentView, *, share: float, seed: int = 0) -> str | None:
    """Keep a sample: about `share` of the documents, chosen by the hash of their text.

    Equal texts get the same choice in every source and run, and a smaller share is a subset of a larger one. The
    choice is independent of `evaluation.held_out_share`, which hashes without this prefix.
    """
    if not 0 < share <= 1:
        raise RecipeError(
            f"the filter `keep_share` needs a `share` above 0 and at most 1, got {share}."
        )
    prefixed = f"keep_share {seed}\n{document['text']}"
    if xxh3_64_intdigest(prefixed.encode(errors="surrogatepass")) < share * 2**64:
        return None
    return f"not in the sample of {share}"


SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s|$)")


def c4(
    document: DocumentView,
    *,
    min_sentences: int = 3,
    drop_phrases: Sequence[str] = ("lorem ipsum",),
    drop_curly_brackets: bool = True,
    bad_words: Sequence[str] = (),
) -> str | None:
    """Drop pages as C4 does: placeholder text, code, too few sentences, bad words.

    The defaults are those of the code that made C4 (tensorflow_datasets, c4_utils.py). A sentence ends with `.`, `!`
    or `?` before whitespace. Code has curly brackets: set `drop_curly_brackets: false` to keep it.

    Args:
        bad_words: whole words, case-insensitive. C4's list:
            LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words on GitHub.
    """
    text = document["text"]
    lower = text.lower()
    for phrase in drop_phrases:
        if phrase in lower:
            return f"c4: contains `{phrase}`"
    if drop_curly_brackets and "{" in text:
        return "c4: contains a curly bracket"
    if bad_words and any(re.search(rf"\b{re.escape(word.lower())}\b", lower) for word in bad_words):
        return "c4: contains a bad word"
    if len(SENTENCE_END.findall(text)) < min_sentences:
        return f"c4: fewer than {min_sentences} sentences"
    return None


PUNCTUATION = (".", "!", "?", '"', "'", "”", "’", "…", "。", "！", "？", "।", "؟")


def fineweb(
    document: DocumentView,
    *,
    min_punctuated_lines: float = 0.12,
    max_duplicate_line_characters: float = 0.1,
    max_short_lines: float = 0.67,
    short_line_characters: int = 30,
    punctuation: Sequence[str] = PUNCTUATION,
) -> str | None:
    """Drop lists and boilerplate by the shape of their lines; empty lines do not count.

    Args:
        min_punctuated_lines: drop if at most this share of lines ends with punctuation.
        max_duplicate_line_characters: drop if at least this share of characters is in repeated lines.
        max_short_lines: drop if at least this share of lines has fewer than `short_line_characters` characters.
    """
    lines = [line for line in map(str.strip, document["text"].splitlines()) if line]
    punctuated = sum(line.endswith(tuple(punctuation)) for line in lines)
    if punctuated <= min_punctuated_lines * len(lines):
        return f"fineweb: at most {min_punctuated_lines} of the lines end with punctuation"
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    if repeated >= max_duplicate_line_characters * sum(map(len, lines)):
        return f"fineweb: at least {max_duplicate_line_characters} of the characters are in repeated lines"
    short = sum(len(line) < short_line_characters for line in lines)
    if short >= max_short_lines * len(lines):
        return f"fineweb: at least {max_short_lines} of the lines are shorter than {short_line_characters} characters"
    return None


STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("•", "-", "*", "●", "‣", "◦", "⁃")
ELLIPSES = ("...", "…")


def gopher_quality(
    document: DocumentView,
    *,
    min_words: int = 50,
    max_words: int = 100_000,
    min_mean_word_length: float = 3.0,
    max_mean_word_length: float = 10.0,
    max_symbols_per_word: float = 0.1,
    max_bullet_lines: float = 0.9,
    max_ellipsis_lines: float = 0.3,
    min_alphabetic_words: float = 0.8,
    min_stop_words: int = 2,
    stop_words: Sequence[str] = STOP_WORDS,
) -> str | None:
    """Drop documents that are not prose, by counts of words, symbols and lines; the defaults are those of the paper.

    Args:
        max_symbols_per_word: `#` and ellipses, counted separately.
        min_alphabetic_words: minimum share of words with a letter.
        min_stop_words: minimum number of different `stop_words`; the defaults are English, so set others, or 0, for
            another language.
    """
    text = document["text"]
    words = text.split()
    if len(words) < min_words:
        return f"gopher: fewer than {min_words} words"
    if len(words) > max_words:
        return f"gopher: more than {max_words} words"
    mean_length = sum(map(len, words)) / max(1, len(words))
    if not min_mean_word_length <= mean_length <= max_mean_word_length:
        return f"gopher: mean word length is not {min_mean_word_length} to {max_mean_word_length}"
    symbols = max(text.count("#"), text.count("...") + text.count("…"))
    if symbols > max_symbols_per_word * len(words):
        return f"gopher: more than {max_symbols_per_word} symbols a word"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if sum(line.startswith(BULLETS) for line in lines) > max_bullet_lines * len(lines):
        return f"gopher: more than {max_bullet_lines} of the lines are bullets"
    if sum(line.endswith(ELLIPSES) for line in lines) > max_ellipsis_lines * len(lines):
        return f"gopher: more than {max_ellipsis_lines} of the lines end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < min_alphabetic_words * len(words):
        return f"gopher: fewer than {min_alphabetic_words} of the words have a letter"
    plain_words = {word.lower().strip(".,;:!?\"'()") for word in words}
    if len(plain_words & set(stop_words)) < min_stop_words:
        return f"gopher: fewer than {min_stop_words} stop words"
    return None


def gopher_repetition(
    document: DocumentView,
    *,
    max_duplicate_lines: float = 0.3,
    max_duplicate_paragraphs: float = 0.3,
    max_duplicate_line_characters: float = 0.2,
    max_duplicate_paragraph_characters: float = 0.2,
    max_top_n_grams: Sequence[float] = (0.20, 0.18, 0.16),
    max_duplicate_n_grams: Sequence[float] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
) -> str | None:
    """Drop repetitive documents; the defaults are those of the paper's table A1.

    Args:
        max_top_n_grams: maximum share of characters in the most frequent repeated 2-, 3-, 4-gram of words, and so on
            to the end of the list.
        max_duplicate_n_grams: maximum share of characters in 5-, 6-, ... 10-grams that occurred before, each character
            counted once.
    """
    text = document["text"]
    limits = [
        ("lines", "\n", max_duplicate_lines, max_duplicate_line_characters),
        ("paragraphs", "\n\n", max_duplicate_paragraphs, max_duplicate_paragraph_characters),
    ]
    for name, separator, max_parts, max_characters in limits:
        parts = [part for part in map(str.strip, text.split(separator)) if part]
        different = set(parts)
        if len(parts) - len(different) > max_parts * len(parts):
            return f"gopher: more than {max_parts} of the {name} are repeated"
        characters = sum(map(len, parts))
        if characters - sum(map(len, different)) > max_characters * characters:
            return f"gopher: more than {max_characters} of the characters are in repeated {name}"
    top_limits = dict(enumerate(max_top_n_grams, start=2))
    duplicate_limits = dict(enumerate(max_duplicate_n_grams, start=5))
    last_n = max([*top_limits, *duplicate_limits], default=0)
    for n, top, duplicate in repeated_n_grams(text.split(), last_n):
        if n in top_limits and top > top_limits[n]:
            return f"gopher: more than {top_limits[n]} of the characters are in one {n}-gram"
        if n in duplicate_limits and duplicate > duplicate_limits[n]:
            return f"gopher: more than {duplicate_limits[n]} of the characters are in repeated {n}-grams"
    return None


def repeated_n_grams(words: list[str], last_n: int) -> Iterator[tuple[int, float, float]]:
    """For n = 2 to `last_n`, yield n, the share of characters in the most frequent repeated n-gram, and the share in
    n-grams seen before."""
    vocabulary: dict[str, int] = {}
    ids = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], np.int64)
    sizes = np.array(list(map(len, words)), np.int64)
    ends = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])  # characters before each word
    grams = ids
    for n in range(2, min(last_n, len(words)) + 1):
        # An n-gram is an (n-1)-gram plus a word.
        pairs = grams[:-1] * len(vocabulary) + ids[n - 1 :]
        _, first, grams, counts = np.unique(
            pairs, return_index=True, return_inverse=True, return_counts=True
        )
        if counts.max() == 1:  # then longer n-grams are not repeated either
            return
        most_frequent = first[counts == counts.max()]
        longest = (ends[most_frequent + n] - ends[most_frequent]).max()
        top = counts.max() * longest
        # Words inside an n-gram that occurred before: the number of such n-grams begun minus those ended.
        repeated = np.flatnonzero(first[grams] != np.arange(len(grams)))
        changes = np.zeros(len(grams) + n, np.int64)
        changes[repeated] += 1
        changes[repeated + n] -= 1
        is_inside = changes.cumsum()[:-1] > 0
        duplicate = sizes[is_inside].sum()
        yield n, float(top / ends[-1]), float(duplicate / ends[-1])


def language(
    document: DocumentView,
    *,
    keep: Sequence[str],
    min_confidence: float = 0.5,
    max_characters: int = 10_000,
) -> str | None:
    """Drop documents that are not in one of the languages `keep`, or only with low confidence.

    Uses py3langid: naive Bayes over byte n-grams, 97 languages, about 10 MB/s on one core (github.com/adbar/py3langid,
    arxiv.org/abs/1107.3765). Its result is meaningless for code or tables: use it on prose.

    Args:
        keep: ISO 639-1 codes: `[en, de]`.
        min_confidence: minimum confidence of py3langid, 0 to 1.
        max_characters: classify only the first characters, this many.
    """
    identifier = language_identifier()
    for code in keep:
        if code not in identifier.labels:
            hint = did_you_mean(code, identifier.labels)
            raise RecipeError(
                f"the filter `language`: unknown language `{code}`.{hint} Known:"
                f" {', '.join(sorted(identifier.labels))}."
            )
    code, confidence = identifier.classify(document["text"][:max_characters])
    if code not in keep:
        return f"language is {code}"
    if confidence < min_confidence:
        return f"language is unsure (confidence below {min_confidence})"
    return None


@cache
def language_identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as problem:
        raise ResourceError(
            f"the filter `language` needs py3langid: {install_line('language')}."
        ) from problem
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICY = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


def normalise(
    document: DocumentView,
    *,
    form: Literal["NFC", "NFKC"] | None = "NFC",
    keep_trailing_whitespace: bool = False,
) -> DocumentView:
    """Normalise to Unicode NFC and `\\n` line ends, strip trailing blanks and remove a byte order mark."""
    text = document["text"].replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    if form is not None:
        text = unicodedata.normalize(form, text)
    if not keep_trailing_whitespace:
        text = "\n".join(map(str.rstrip, text.split("\n"))).rstrip("\n")
    return {**document, "text": text}


def c4_lines(
    document: DocumentView,
    *,
    min_words: int = 5,
    require_punctuation: bool = True,
    drop_javascript: bool = True,
    drop_policies: bool = True,
    drop_citations: bool = True,
) -> DocumentView:
    """Drop the lines that C4 drops (arxiv.org/abs/1910.10683, section 2.2): too short, without end punctuation,
    JavaScript and policy notices.

    The defaults are those of the code that made C4 (tensorflow_datasets, c4_utils.py). FineWeb does not use
    `require_punctuation`.
    """
    lines = []
    for line in map(str.strip, document["text"].splitlines()):
        clean = CITATION.sub("", line) if drop_citations else line
        lower = clean.lower()
        is_ended = clean.endswith((".", "?", "!", '"')) and not clean.endswith("...")
        if len(clean.split()) < min_words or require_punctuation and not is_ended:
            continue
        if drop_javascript and "javascript" in lower:
            continue
        if drop_policies and any(notice in lower for notice in POLICY):
            continue
        lines.append(clean)
    return {**document, "text": "\n".join(lines)}


def drop_lines(document: DocumentView, *, lines: Collection[str]) -> DocumentView:
    """Drop these lines, and paragraphs of several lines; blanks at their ends and repeated blanks do not matter."""
    return {**document, "text": without_lines(document["text"], set(lines))}


def without_lines(text: str, dropped: Collection[str]) -> str:
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if "\n".join(lines_of(paragraph)) in dropped:
            continue
        lines = [line for line in paragraph.split("\n") if " ".join(line.split()) not in dropped]
        if lines:
            paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def lines_of(paragraph: str) -> list[str]:
    lines = (" ".join(line.split()) for line in paragraph.split("\n"))
    return [line for line in lines if line]


FILTERS = (
    length,
    pattern,
    keep_share,
    language,
    c4,
    gopher_quality,
    gopher_repetition,
    fineweb,
    decontaminate,
)
VERSIONS = {function.__name__: 1 for function in (*FILTERS, normalise, c4_lines, drop_lines)}
VERSIONS["decontaminate"] = 2
"""In the names of stored tokens: incremented when the results of a filter or transform change."""
BUILT_IN: dict[str, dict[str, Callable[..., Any]]] = {
    "transform": {"normalise": normalise, "c4_lines": c4_lines, "drop_lines": drop_lines},
    "filter": {function.__name__: function for function in FILTERS},
}
Transform = Callable[[DocumentView], DocumentView | list[DocumentView]]
Filter = Callable[[DocumentView], str | None]
ComponentLists = Mapping[str, Sequence[Component]]  # location in the recipe -> the list


@dataclass(frozen=True)
class Sieve:
    """The transforms and filters of a source."""

    transforms: ComponentLists
    filters: ComponentLists

    def functions(self) -> tuple[list[Transform], list[Filter]]:
        transforms = build_components("transform", self.transforms)
        return transforms, build_components("filter", self.filters)

    def code(self) -> dict[str, list[list[object]]]:
        """Names, options and versions of the functions, for the key of stored tokens."""
        return {
            "transforms": code_of_components("transform", self.transforms),
            "filters": code_of_components("filter", self.filters),
        }


def sieve_of(data: Data, source: DocumentSource, key: str) -> Sieve:
    """The transforms and filters of a source. Held-out sets get only the transforms, so equal texts stay equal."""
    if not isinstance(source, Source):
        return Sieve({"data.transforms": data.transforms}, {})
    transforms = {"data.transforms": data.transforms, f"{key}.transforms": source.transforms}
    return Sieve(transforms, {"data.filters": data.filters, f"{key}.filters": source.filters})


def build_components(kind: str, lists: ComponentLists) -> list[Callable[..., Any]]:
    functions: list[Callable[..., Any]] = []
    for key, components in lists.items():
        for number, component in enumerate(components):
            function = find(kind, component.name, BUILT_IN[kind])
            check_options(function, component.options, f"{key}[{number}]")
            functions.append(partial(function, **component.options))
    return functions


def code_of_components(kind: str, lists: ComponentLists) -> list[list[object]]:
    code: list[list[object]] = []
    for component in chain.from_iterable(lists.values()):
        options = key_options(component.name, component.options)
        code.append([component.name, options, version_text(kind, component)])
    return code


def version_text(kind: str, component: Component) -> str:
    """A built-in function's version, or the text of the module of a user's: part of the names of stored tokens."""
    function = BUILT_IN[kind].get(component.name)
    if function is None:
        return module_text(kind, component.name)
    version = VERSIONS[component.name]
    if version == 1 or component.options.get("comparison") == FIRST_COMPARISON:
        return first_texts()[function.__module__]
    return f"version {version}"


@cache
def first_texts() -> dict[str, str]:
    """Module -> its text of version 1, which the names contained before there were versions."""
    packed = (Path(__file__).parent / "version_1.json.gz").read_bytes()
    return dict(json.loads(gzip.decompress(packed)))


def module_text(kind: str, name: str) -> str:
    """The source code of a module with a user's function: a change in it invalidates stored tokens."""
    function = find(kind, name, {})
    module = inspect.getmodule(function)
    is_importable = module is not None and module.__name__ != "__main__"
    try:
        return inspect.getsource(module if is_importable else function)  # type: ignore[arg-type]
    except (OSError, TypeError) as problem:
        raise RecipeError(
            f"the {kind} `{name}` must be a function in a Python file, so that changes to it are noticed."
        ) from problem


def sift(
    document: Document, source_name: str, transforms: Sequence[Transform], filters: Sequence[Filter]
) -> Iterator[tuple[str, str | None]]:
    """Apply the transforms in order and yield each resulting text with the reason to drop it or None."""
    if not transforms and not filters:  # the fast path
        yield document.text, "empty" if not document.text or document.text.isspace() else None
        return
    views: list[DocumentView] = [View(document, source_name)]
    for transform in transforms:
        views_before = views
        views = []
        for view in views_before:
            returned = called_on(transform, view)
            views += returned if isinstance(returned, list) else [returned]
        for view in views:
            refuse_other_than_view(view, transform)
        if not views:
            yield document.text, f"the transform {name_of(transform)} returned an empty list"
            return
    for view in views:
        yield view["text"], reason_to_drop(view, filters)


def refuse_other_than_view(returned: object, transform: Transform) -> None:
    is_view = isinstance(returned, Mapping) and {"text", "source", "where"} <= set(returned)
    if not is_view or not isinstance(cast(DocumentView, returned)["text"], str):
        raise RecipeError(
            f"the transform {name_of(transform)} returned {str(returned)[:80]!r}. It must return the document,"
            " changed, or a list of documents: `return {**document, 'text': ...}`."
        )


@dataclass(frozen=True)
class View(Mapping[str, str]):
    """A document as filters see it; `where`, which counts lines, is computed only on access."""

    document: Document
    source: str

    def __getitem__(self, name: str) -> str:
        if name == "where":
            return self.document.where
        return {"text": self.document.text, "source": self.source}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("text", "source", "where"))

    def __len__(self) -> int:
        return 3


def reason_to_drop(document: DocumentView, filters: Sequence[Filter]) -> str | None:
    """The first filter's reason, or None; a document without visible characters is `empty`."""
    if not document["text"].strip():
        return "empty"
    for check in filters:
        reason = called_on(check, document)
        if isinstance(reason, str) and reason:
            return reason
        if reason is not None:
            raise RecipeError(
                f"the filter {name_of(check)} returned {reason!r}. It must return a string, the reason to drop, or"
                " None to keep."
            )
    return None


def called_on(function: Callable[..., Any], document: Mapping[str, str]) -> Any:
    try:
        return function(document)
    except UserCodeError as problem:
        raise UserCodeError(f"{document['where']}: {problem}") from problem.__cause__


def name_of(function: Callable[..., Any]) -> str:
    return function.func.__name__ if isinstance(function, partial) else str(function)
