"""What the documents are: how many, how long, in which formats and languages, under which licence, how many tokens."""

import importlib.util
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from cpt.data.filters.built_in import language_identifier
from cpt.data.readers.documents import BadRow, Document, Piece
from cpt.data.readers.files import CONVERTED
from cpt.data.readers.formats import KNOWN, TEXTS
from cpt.data.readers.opening import format_of
from cpt.data.readers.sources import files_with_sizes, kind_of, pieces_of, read_piece
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.recipe.schema import DocumentSource

READ_BYTES = 64 * 2**20  # of files; of more, pieces are drawn
PIECE_BYTES = 4 * 2**20
TOKENISED = 400  # documents
LONGEST_TOKENISED = 100_000  # characters of one
TEXT_COLUMNS = (
    "text",
    "content",
    "body",
    "document",
    "article",
    "raw_content",
    "page_content",
    "markdown",
    "code",
    "abstract",
)
FEWEST_DOCUMENTS = 50  # of which a fifth, 10, can be held out
MOST_BAD = 0.05
LICENCE_FILE = re.compile(r"(licen[cs]e|copying)([._-].*)?", re.IGNORECASE)
LICENCES = {
    "MIT": "MIT License",
    "Apache-2.0": "Apache License",
    "GPL": "GNU GENERAL PUBLIC LICENSE",
    "CC-BY-SA-4.0": "Attribution-ShareAlike 4.0",
    "CC-BY-NC-4.0": "Attribution-NonCommercial 4.0",
    "CC-BY-4.0": "Attribution 4.0",
    "CC0-1.0": "CC0 1.0",
}
ENGLISH = (
    "The question of how a machine can learn from what people have written is an old one. A reader who opens a book"
    " brings along most of what is needed to understand it: the words, the order in which they may stand, and a large"
    " part of the world that they speak about."
)


@dataclass(frozen=True)
class TokenEstimate:
    """How many tokens there are, with the interval that 95 of 100 samples would give."""

    tokens: int
    low: int
    high: int
    tokenised: int
    """Documents that the estimate comes from; all of them: it is a count."""
    bytes_per_token: float
    compared_with_english: float
    """Bytes per token of these documents, as a share of those of plain English: far below 1, the tokenizer was not
    made for them."""


@dataclass
class DocumentFacts:
    """What was seen of a source."""

    source: DocumentSource
    formats: Counter[str]
    num_files: int
    file_bytes: int
    documents: int = 0
    """Estimated where not all was read."""
    text_bytes: int = 0
    bad_rows: int = 0
    first_bad: str = ""
    repeats: int = 0
    """Documents among those that were read whose text was read before."""
    documents_read: int = 0
    is_whole: bool = True
    licence_files: dict[str, str | None] = field(default_factory=dict)
    """File -> what licence it looks like, None where it cannot be told."""
    languages: Counter[str] | None = None
    """Of the sample; None where the package that tells them is missing."""
    sample: list[str] = field(default_factory=list)

    @property
    def bad_share(self) -> float:
        """Of the rows that were read."""
        return self.bad_rows / max(1, self.bad_rows + self.documents_read)

    @property
    def licence(self) -> str | None:
        """What the licence files agree on."""
        found = set(self.licence_files.values())
        return next(iter(found)) if len(found) == 1 else None

    @property
    def main_language(self) -> str | None:
        """The language of most of the sample."""
        return self.languages.most_common(1)[0][0] if self.languages else None


def look_at_documents(path: str, text_column: str | None = None) -> DocumentFacts:
    """Read the documents, or 64 MiB of them drawn by chance.

    Args:
        path: file, folder or glob.
        text_column: where a row's text stands; found by itself where it is one of the usual names.

    Raises:
        DataError: there are none, too few to evaluate on, or too many bad rows, each with the remedy.
    """
    source = find_source(path, text_column)
    files = files_with_sizes(source, "DOCUMENTS")
    formats = Counter(format_of(name).removeprefix(".") for name, _ in files)
    facts = DocumentFacts(
        source, formats, len(files), sum(size for _, size in files), licence_files=licence_files(path)
    )
    read(facts, pieces_of(source, "DOCUMENTS", PIECE_BYTES))
    refuse_unusable(facts)
    facts.languages = languages_of(facts.sample)
    return facts


def find_source(path: str, text_column: str | None) -> DocumentSource:
    """The recipe's source for these documents, with the column that their texts stand in.

    Raises:
        DataError: nothing is there, or no column of the usual names.
    """
    folder = Path(path).expanduser()
    if kind_of(path) != "local":
        raise DataError(
            f"{path}: DOCUMENTS is a file, folder or glob of this machine. What lies elsewhere is a source of the"
            " recipe."
        )
    try:
        source = DocumentSource(path=path)
        files = [name for name, _ in files_with_sizes(source, "DOCUMENTS")]
    except DataError as problem:
        if convertible := suffixes_to_convert(folder):
            raise DataError(
                f"{path} holds {', '.join(convertible)} files and no {KNOWN}. {convert_first(folder)}"
            ) from problem
        raise DataError(f"{str(problem).split(' Set `DOCUMENTS.path`')[0]} Give another DOCUMENTS.") from problem
    first = next((name for name in files if format_of(name) not in TEXTS), files[0])
    missing: BadRow | None = None
    for column in [text_column] if text_column else TEXT_COLUMNS:
        source = DocumentSource(path=path, text_column=column)
        item = next(read_piece(source, Piece(first, 0, None, 0), "DOCUMENTS"), None)
        if not isinstance(item, BadRow) or item.reason != "missing column":
            return source
        missing = missing or item
    assert missing is not None, "one column at least was looked for"
    raise DataError(f"{missing.where}: {missing.detail}. Say which column holds the text: --text-column NAME.")


def suffixes_to_convert(folder: Path) -> list[str]:
    """Of the files in a folder that `cpt data ingest` reads and a recipe does not."""
    return (
        sorted({file.suffix for file in folder.rglob("*") if file.suffix.lower() in CONVERTED})
        if folder.is_dir()
        else []
    )


def convert_first(folder: Path) -> str:
    """What to type."""
    return f"Convert them first: cpt data ingest {folder} --output {folder.name}-text, and give that folder."


def read(facts: DocumentFacts, pieces: Sequence[Piece]) -> None:
    """Go through pieces in an order by chance, always the same, until enough is read."""
    draw = random.Random(0)
    order = draw.sample(list(pieces), len(pieces))
    seen: set[int] = set()
    done_bytes = 0
    for piece in order:
        if done_bytes >= READ_BYTES:
            facts.is_whole = False
            break
        for item in read_piece(facts.source, piece, "DOCUMENTS"):
            take(facts, item, seen, draw)
        done_bytes += (piece.stop or Path(piece.path).stat().st_size) - piece.start
    scale = 1.0 if facts.is_whole else facts.file_bytes / done_bytes
    facts.documents, facts.text_bytes = round(facts.documents_read * scale), round(facts.text_bytes * scale)


def take(facts: DocumentFacts, item: Document | BadRow, seen: set[int], draw: random.Random) -> None:
    """Count one row, and keep its text for the sample with the chance that all have."""
    if isinstance(item, BadRow):
        facts.bad_rows += item.num_rows
        facts.first_bad = facts.first_bad or f"{item.where}: {item.detail}"
        return
    facts.documents_read += 1
    encoded = item.text.encode()
    facts.text_bytes += len(encoded)
    digest = xxh3_64_intdigest(encoded)
    facts.repeats += digest in seen
    seen.add(digest)
    if len(facts.sample) < TOKENISED:
        facts.sample.append(item.text)
    elif (place := draw.randrange(facts.documents_read)) < TOKENISED:
        facts.sample[place] = item.text


def refuse_unusable(facts: DocumentFacts) -> None:
    """Documents that no run would take, or that cannot be judged."""
    path = facts.source.path
    folder = Path(path).expanduser()
    others = suffixes_to_convert(folder)
    converted = (
        f" It also holds {', '.join(others)} files, which were not read. {convert_first(folder)}" if others else ""
    )
    if facts.bad_share > MOST_BAD:
        raise DataError(
            f"{path}: {facts.bad_rows:,} of {facts.bad_rows + facts.documents_read:,} rows are not documents; the"
            f" first: {facts.first_bad}. Fix them, or leave these files out.{converted}"
        )
    if facts.documents < FEWEST_DOCUMENTS:
        files = (
            "A txt or md file is one document: split long ones, one file a chapter. "
            if facts.formats.keys() & {"txt", "md"}
            else ""
        )
        raise DataError(
            f"{path}: {facts.documents:,} document(s), but {FEWEST_DOCUMENTS} are needed: some are held out to see"
            f" whether it helped, and fewer than {FEWEST_DOCUMENTS // 5} held-out documents tell nothing. {files}Give"
            f" more.{converted}"
        )


def licence_files(path: str) -> dict[str, str | None]:
    """Licence files in the folder of the documents, with the licence that their beginnings name."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return {}
    found = sorted(file for file in folder.rglob("*") if file.is_file() and LICENCE_FILE.fullmatch(file.name))[:20]
    return {str(file.relative_to(folder)): licence_named_in(file.read_text(errors="replace")[:2000]) for file in found}


def licence_named_in(text: str) -> str | None:
    """The licence whose title stands in the text."""
    return next((name for name, title in LICENCES.items() if title.lower() in text.lower()), None)


def languages_of(texts: Sequence[str]) -> Counter[str] | None:
    """How many of the texts are in which language."""
    if importlib.util.find_spec("py3langid") is None:
        return None
    identifier = language_identifier()
    return Counter(identifier.classify(text[:2000])[0] for text in texts[:200])


def estimate_tokens(facts: DocumentFacts, encoder: DocumentEncoder) -> TokenEstimate:
    """Tokens of all documents, from the tokens per byte of the sample (a ratio estimate, with its linearised standard
    error)."""
    texts = [text[:LONGEST_TOKENISED] for text in facts.sample]
    num_bytes = np.array([len(text.encode()) for text in texts], float)
    tokens = encoder.encode(texts)[1].astype(float)
    ratio = tokens.sum() / max(1.0, num_bytes.sum())
    is_count = facts.is_whole and facts.documents == len(texts) and num_bytes.sum() == facts.text_bytes
    error = 0.0
    if not is_count and len(texts) > 1:
        rest = 1 - len(texts) / max(len(texts), facts.documents)
        residuals = tokens - ratio * num_bytes
        error = math.sqrt(len(texts) / (len(texts) - 1) * float((residuals**2).sum()) * rest) / float(num_bytes.sum())
    total = ratio * facts.text_bytes
    spread = 1.96 * error * facts.text_bytes
    english = len(ENGLISH.encode()) / int(encoder.encode([ENGLISH])[1].sum())
    return TokenEstimate(
        round(total), round(total - spread), round(total + spread), len(texts), 1 / ratio, 1 / ratio / english
    )
