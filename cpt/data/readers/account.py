"""The account of a source's text, from its files to its rows: all that is dropped has a reason, a number and bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cpt.data.readers.documents import BadRow, File, Listed, complaint, count_reasons, listed
from cpt.data.readers.listing import Listing
from cpt.errors import DataError
from cpt.formatting import format_bytes
from cpt.recipe.schema import DocumentSource

REMOVED = "removed by transforms"
ADDED = "added by transforms"  # as negative bytes
NOT_LEARNED = "prompts, not learned"  # of conversations
NO_BYTES = "bytes not counted: the tokens were stored by an earlier version"

MOST_CONTENT = 4 * 2**20  # bytes of bad rows that are kept of each part of a source


@dataclass
class Losses:
    """The documents and bytes that are dropped while a part of a source is read."""

    bad_rows: list[Listed] = field(default_factory=list)
    documents: Counter[str] = field(default_factory=Counter)  # by reason
    num_bytes: Counter[str] = field(default_factory=Counter)  # of their texts in UTF-8, by reason
    counts_lost_files: bool = False  # instead of ending at them
    content_bytes: int = 0  # of all bad rows

    def drop(self, text: str, reason: str) -> None:
        self.documents[reason] += 1
        self.num_bytes[reason] += len(text.encode())

    def drop_row(self, bad: BadRow, key: str) -> None:
        """Count a skipped row; DataError if a whole file is lost with it, or the rest of one."""
        if bad.loses_file and not self.counts_lost_files:
            raise DataError(complaint(bad, key))
        self.content_bytes += len(bad.content or b"")
        if self.content_bytes > MOST_CONTENT:
            bad = replace(bad, content=None)
        self.bad_rows.append(listed(bad))
        self.num_bytes[bad.reason] += bad.num_bytes

    def count_transformed(self, before: str, after: list[str]) -> None:
        removed = len(before.encode()) - sum(len(text.encode()) for text in after)
        if removed:
            self.num_bytes[REMOVED if removed > 0 else ADDED] += removed

    def add(self, other: "Losses") -> None:
        self.bad_rows += other.bad_rows
        self.documents.update(other.documents)
        self.num_bytes.update(other.num_bytes)

    def account(
        self, name: str, documents: int, num_bytes: int, listing: Listing | None = None
    ) -> "Account":
        """The account of a source that was read and not yet tokenised; the documents that are kept."""
        return Account(
            name=name,
            documents=documents,
            held_out=None,
            dropped=dict(self.documents),
            bad_rows=count_reasons(self.bad_rows),
            is_estimate=False,
            text=TextBytes(num_bytes, 0, dict(self.num_bytes)),
            files_read=files_read(listing.files if listing else ()),
            files_passed_over=listing.passed_over if listing else {},
            tokens=None,
            rows=None,
        )


@dataclass(frozen=True)
class TextBytes:
    """Bytes of texts in UTF-8. `read` is what readers returned, and bad rows as they are in the file."""

    trained: int
    held_out: int
    dropped: dict[str, int]

    @property
    def read(self) -> int:
        return self.trained + self.held_out + sum(self.dropped.values())

    def plus(self, other: "TextBytes") -> "TextBytes":
        dropped = Counter(self.dropped)
        dropped.update(other.dropped)
        return TextBytes(
            trained=self.trained + other.trained,
            held_out=self.held_out + other.held_out,
            dropped=dict(dropped),
        )

    def scaled(self, scale: float) -> "TextBytes":
        return TextBytes(
            trained=round(scale * self.trained),
            held_out=round(scale * self.held_out),
            dropped={reason: round(scale * count) for reason, count in self.dropped.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Account:
    """The text of one source. Unknown numbers are None: `cpt check` reads documents, but makes no rows."""

    name: str
    documents: int  # documents trained on; if `held_out` is None, all that are kept
    held_out: int | None
    """Evaluated, or equal to a document of a held-out set; never trained on."""
    dropped: dict[str, int]  # reason -> documents
    bad_rows: dict[str, int]  # reason -> rows
    is_estimate: bool  # extrapolated from what was read so far
    text: TextBytes | None
    files_read: tuple[int, int] | None  # number, bytes
    files_passed_over: dict[str, tuple[int, int]]  # reason -> number, bytes
    tokens: int | None
    rows: int | None
    lost_share: float | None = None
    """Share of the characters that the tokenizer does not give back; None: not compared."""
    num_spelled: int = 0
    """Special tokens that are spelled in the text."""


def with_held_out(account: Account, held_out: int, num_bytes: int) -> Account:
    assert account.text is not None
    text = replace(account.text, trained=account.text.trained - num_bytes, held_out=num_bytes)
    return replace(account, documents=account.documents - held_out, held_out=held_out, text=text)


def separator_warning(source: DocumentSource, account: Account) -> str | None:
    """A warning if the separator of `text_documents` occurs in no file, so that each file is one document."""
    separator = source.text_documents
    if separator in ("file", "line") or account.files_read is None:
        return None
    num_documents = account.documents + (account.held_out or 0) + sum(account.dropped.values())
    num_files = account.files_read[0]
    if num_documents > num_files or account.is_estimate:
        return None
    return (
        f"{account.name}: the separator {separator!r} of `text_documents` is in none of {num_files:,} file(s), so each"
        " file is one document. Look at a file, and set the separator that it has"
    )


def format_account(account: Account) -> str:
    """The account as one line: files, documents with their bytes, bad rows, tokens and rows."""
    about = "about " if account.is_estimate else ""
    text = account.text
    sizes = {} if text is None else text.dropped
    sentences = [f"{about}{format_documents(account)}"]
    if account.dropped:
        sentences.append(f"dropped: {amounts(account.dropped, sizes)}")
    if account.bad_rows:
        sentences.append(f"bad rows: {amounts(account.bad_rows, sizes)}")
    for reason in (REMOVED, ADDED, NOT_LEARNED):
        if sizes.get(reason):
            sentences.append(f"{format_bytes(abs(sizes[reason]))} {reason}")
    if text is None:
        sentences.append(NO_BYTES)
    if account.files_read is not None:
        sentences.insert(0, format_files(account.files_read, account.files_passed_over))
    if account.tokens is not None and account.rows is not None:
        sentences.append(f"{about}{account.tokens:,} tokens in {account.rows:,} rows")
    if account.lost_share is not None:
        sentences.append(f"the tokenizer loses {account.lost_share:.2%} of the characters")
    if account.num_spelled:
        sentences.append(f"{account.num_spelled:,} special tokens are spelled in the text")
    return f"{account.name}: {'; '.join(sentences)}"


def format_files(read: tuple[int, int], passed_over: Mapping[str, tuple[int, int]]) -> str:
    """`12 files read (34.1 MiB), not read: 2 README (3.0 KiB)`."""
    num_files, num_bytes = read
    noun = "file" if num_files == 1 else "files"
    line = amount(num_files, f"{noun} read", num_bytes)
    if not passed_over:
        return line
    counts = {reason: count for reason, (count, _) in passed_over.items()}
    sizes = {reason: size for reason, (_, size) in passed_over.items()}
    return f"{line}, not read: {amounts(counts, sizes)}"


def format_documents(account: Account) -> str:
    """`1,203 documents (33.9 MiB): 1,100 trained on (32.1 MiB), 60 held out (1.6 MiB)`."""
    text = account.text or TextBytes(0, 0, {})  # unknown sizes are not written
    held_out = account.held_out or 0
    trained = "kept" if account.held_out is None else "trained on"
    parts = [amount(account.documents, trained, text.trained)]
    if held_out:
        parts.append(amount(held_out, "held out", text.held_out))
    num_read = account.documents + held_out + sum(account.dropped.values())
    return f"{amount(num_read, 'documents', text.read)}: {', '.join(parts)}"


def amounts(counts: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    return ", ".join(amount(count, kind, sizes.get(kind)) for kind, count in counts.items())


def amount(count: int, kind: str, num_bytes: int | None) -> str:
    """`12 empty (3.0 KiB)`; without a size that is unknown or 0."""
    size = f" ({format_bytes(num_bytes)})" if num_bytes else ""
    return f"{count:,} {kind}{size}"


def files_read(files: Sequence[File]) -> tuple[int, int] | None:
    """Number and bytes of a source's files; None for a function's rows."""
    return (len(files), sum(file.size for file in files)) if files else None
