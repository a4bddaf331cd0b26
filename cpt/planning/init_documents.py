"""What the documents are: how many, in which formats and languages, and how many tokens."""

import importlib.util
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from cpt.data.readers.documents import BadRow, Document, Piece
from cpt.data.readers.filters import language_identifier
from cpt.data.readers.opening import format_of
from cpt.data.readers.sources import CONVERTED, files_with_sizes, kind_of, pieces_of, read_piece
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.recipe.paths import TEXT_FILES
from cpt.recipe.schema import DocumentSource

READ_BYTES = 64 * 2**20  # of files; of more, pieces are drawn
PIECE_BYTES = 4 * 2**20
TOKENISED = 400  # documents
LONGEST_TOKENISED = 100_000  # characters of one
TEXT_COLUMNS = ("text", "content", "body", "document", "article", "raw_content", "page_content", "markdown", "code")
FEWEST_DOCUMENTS = 50  # of which a fifth, 10, can be held out
MOST_BAD = 0.05
ENGLISH = (
    "The question of how a machine can learn from what people have written is an old one. A reader who opens a book"
    " brings along most of what is needed to understand it: the words, the order in which they may stand, and a large"
    " part of the world that they speak about."
)


@dataclass
class DocumentFacts:
    source: DocumentSource
    formats: Counter[str]
    documents: int = 0
    """Estimated if not all was read."""
    text_bytes: int = 0
    bad_rows: int = 0
    first_bad: str = ""
    repeats: int = 0
    """Documents among those read whose text was read before."""
    documents_read: int = 0
    is_whole: bool = True
    languages: Counter[str] | None = None
    """Of the sample; None without the package that identifies them."""
    sample: list[str] = field(default_factory=list)
    tokens: int = 0
    """Estimated from the sample, unless it holds all documents."""
    bytes_per_token: float = 0.0
    compared_with_english: float = 1.0
    """Bytes per token as a share of plain English's: far below 1, the tokenizer was not made for these documents."""

    @property
    def bad_share(self) -> float:
        return self.bad_rows / max(1, self.bad_rows + self.documents_read)

    @property
    def main_language(self) -> str | None:
        return self.languages.most_common(1)[0][0] if self.languages else None


def read_documents(path: str, text_column: str | None, encoder: DocumentEncoder) -> DocumentFacts:
    """Read the documents, or 64 MiB of them drawn by chance, and tokenise a sample.

    Args:
        path: file, folder or glob.
        text_column: by default the first of the usual names.

    Raises:
        DataError: there are none, too few to evaluate on, or too many bad rows.
    """
    source = find_source(path, text_column)
    files = files_with_sizes(source, "DOCUMENTS")
    facts = DocumentFacts(source, Counter(format_of(name).removeprefix(".") for name, _ in files))
    draw, seen, done_bytes = random.Random(0), set[int](), 0
    pieces = list(pieces_of(source, "DOCUMENTS", PIECE_BYTES))
    for piece in draw.sample(pieces, len(pieces)):
        if done_bytes >= READ_BYTES:
            facts.is_whole = False
            break
        for item in read_piece(source, piece, "DOCUMENTS"):
            add_row(facts, item, seen, draw)
        done_bytes += (piece.stop or Path(piece.path).stat().st_size) - piece.start
    scale = 1.0 if facts.is_whole else sum(size for _, size in files) / done_bytes
    facts.documents, facts.text_bytes = round(facts.documents_read * scale), round(facts.text_bytes * scale)
    refuse_unusable(facts)
    if importlib.util.find_spec("py3langid") is not None:
        identifier = language_identifier()
        facts.languages = Counter(identifier.classify(text[:2000])[0] for text in facts.sample[:200])
    texts = [text[:LONGEST_TOKENISED] for text in facts.sample]
    tokens = int(encoder.encode(texts)[1].sum())
    facts.bytes_per_token = sum(len(text.encode()) for text in texts) / max(1, tokens)
    facts.tokens = round(facts.text_bytes / facts.bytes_per_token)
    english = len(ENGLISH.encode()) / int(encoder.encode([ENGLISH])[1].sum())
    facts.compared_with_english = facts.bytes_per_token / english
    return facts


def add_row(facts: DocumentFacts, item: Document | BadRow, seen: set[int], draw: random.Random) -> None:
    """Count one row; each document has the same chance to be in the sample."""
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


def find_source(path: str, text_column: str | None) -> DocumentSource:
    """The recipe's source for these documents, with the column of their texts.

    Raises:
        DataError: nothing is there, or no column of the usual names.
    """
    if kind_of(path) != "local":
        raise DataError(f"{path}: DOCUMENTS is a file, folder or glob of this machine.")
    try:
        files = [name for name, _ in files_with_sizes(DocumentSource(path=path), "DOCUMENTS")]
    except DataError as problem:
        text = str(problem).split(" Set `DOCUMENTS.path`")[0]
        raise DataError(f"{text} {to_convert(path) or 'Give another DOCUMENTS.'}") from problem
    first = next((name for name in files if format_of(name) not in TEXT_FILES), files[0])
    missing: BadRow | None = None
    for column in [text_column] if text_column else TEXT_COLUMNS:
        source = DocumentSource(path=path, text_column=column)
        item = next(read_piece(source, Piece(first, 0, None, 0), "DOCUMENTS"), None)
        if not isinstance(item, BadRow) or item.reason != "missing column":
            return source
        missing = missing or item
    assert missing is not None, "one column at least was tried"
    raise DataError(f"{missing.where}: {missing.detail}. Say which column holds the text: --text-column NAME.")


def to_convert(path: str) -> str:
    """What to type if a folder has files that only `cpt data ingest` reads."""
    folder = Path(path).expanduser()
    found = {file.suffix for file in folder.rglob("*") if file.suffix.lower() in CONVERTED} if folder.is_dir() else ()
    if not found:
        return ""
    name = f"{folder.name}-text"
    return f"Convert its {', '.join(sorted(found))} files with: cpt data ingest {folder} --output {name}"


def refuse_unusable(facts: DocumentFacts) -> None:
    path, converted = facts.source.path, to_convert(facts.source.path)
    if facts.bad_share > MOST_BAD:
        rows = facts.bad_rows + facts.documents_read
        raise DataError(
            f"{path}: {facts.bad_rows:,} of {rows:,} rows are not documents; the first: {facts.first_bad}. Fix them,"
            f" or remove these files. {converted}"
        )
    if facts.documents < FEWEST_DOCUMENTS:
        split = "A txt or md file is one document: split long ones. " if facts.formats.keys() & {"txt", "md"} else ""
        raise DataError(
            f"{path}: {facts.documents:,} document(s), but {FEWEST_DOCUMENTS} are needed, since some are held out for"
            f" the evaluation. {split}{converted or 'Give more.'}"
        )
