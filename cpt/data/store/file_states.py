"""Which versions of a source's files its stored tokens are of: size, times and inode, and a hash where they differ."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import commonpath
from pathlib import Path

from xxhash import xxh3_128

from cpt.cache import key_of
from cpt.data.readers.documents import File, Piece
from cpt.data.readers.opening import is_url, unsigned
from cpt.data.store.token_files import ShardDescription, TokenFiles
from cpt.errors import DataError
from cpt.files import hash_of, read_sealed, sealed, signature_of, write_atomic

RECORD = "files.json"
BLOCK = 2**20
BEYOND = 2**16  # bytes after a piece that its hash covers: the end of its last line
Shard = list[Piece]
States = dict[str, tuple[int, str]]  # file -> size and version
Signature = tuple[int | str, ...]


@dataclass(frozen=True)
class OtherPlace:
    """The same shard in the store of the same files at another place."""

    folder: Path
    path_here: dict[str, str]  # of the shard's files, by their path there

    def where_here(self, where: str) -> str:
        """The place of a document, such as `there/a.jsonl:17`, in the files here."""
        there = max(filter(where.startswith, self.path_here), key=len, default="")
        return self.path_here.get(there, "") + where[len(there) :]


@dataclass(frozen=True)
class StoredFiles:
    """The files of a source as its stored tokens know them.

    `files`: with the version in the names of stored tokens. `signatures`: file -> size, mtime, inode and ctime.
    `moved_from`: the store of these files at another place, and the files there, in the same order.
    """

    files: list[File]
    signatures: dict[str, Signature]
    moved_from: tuple[Path, list[File]] | None = None

    @cached_property
    def file_there(self) -> dict[str, File]:
        if self.moved_from is None:
            return {}
        _, files = self.moved_from
        return dict(zip([file.name for file in self.files], files, strict=True))

    def at_other_place(self, shard: Shard) -> OtherPlace | None:
        if self.moved_from is None:
            return None
        store, _ = self.moved_from
        files = [self.file_there[piece.path] for piece in shard]
        pieces = [piece._replace(path=file.name) for piece, file in zip(shard, files, strict=True)]
        return OtherPlace(
            folder=store / shard_name(pieces, states_of_files(files)),
            path_here={file.name: piece.path for piece, file in zip(shard, files, strict=True)},
        )


def stored_files(
    folder: Path, like: str, shards: Sequence[Shard], files: Sequence[File]
) -> StoredFiles:
    """Compare files with the record of a store, and renew the record.

    A file keeps its version while its size, mtime, inode and ctime stay, which costs a stat. Where one differs (an
    edit, a copied or moved folder, another file with the old time), hashes in the shards made from it decide.

    Args:
        folder: of the store.
        like: equal for stores that differ only in the place of their files.
        files: of the source; the version of a local one is its modification time.
    """
    signatures = signatures_of(files)
    if all(is_url(file.name) for file in files):
        return StoredFiles(list(files), signatures)
    record = read_sealed(folder / RECORD) or {"files": {}}
    states = states_of_files(files)
    changed: set[str] = set()
    for name, (size, _) in states.items():
        version, *signature = record["files"].get(name, [""])
        if tuple(signature) != signatures[name]:
            changed.add(name)
        if signature and signature[0] == size:
            states[name] = size, version
    if changed or len(record["files"]) != len(files):
        states = uncontradicted(folder, shards, files, states, changed)
        if "like" not in record:
            record = {"like": like, "moved_from": find_other_place(folder, like, files)}
        record["files"] = {}
        for name, (_, version) in states.items():
            record["files"][name] = [version, *signatures[name]]
        with suppress(OSError):  # a read-only store
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / RECORD, sealed(record))
    moved_from = None
    if record["moved_from"]:
        other_store = folder.with_name(record["moved_from"])
        other_files = files_at_other_place(other_store, like, files)
        if other_files:
            moved_from = (other_store, other_files)
    versioned = []
    for file in files:
        _, version = states[file.name]
        versioned.append(file._replace(version=version))
    return StoredFiles(versioned, signatures, moved_from)


def signatures_of(files: Sequence[File]) -> dict[str, Signature]:
    signatures: dict[str, Signature] = {}
    for file in files:
        if is_url(file.name):
            signatures[file.name] = file.size, file.version
        else:
            signatures[file.name] = signature_of(file.name)
    return signatures


def states_of_files(files: Sequence[File]) -> States:
    return {file.name: (file.size, file.version) for file in files}


def shard_name(shard: Shard, states: States) -> str:
    """The folder of a shard, by the state of its files: a changed file affects only its shards."""
    pieces = []
    for piece in shard:
        state = states.get(piece.path)
        pieces.append([unsigned(piece.path), piece.start, piece.stop, state])
    return key_of({"pieces": pieces})


def uncontradicted(
    folder: Path,
    shards: Sequence[Shard],
    files: Sequence[File],
    states: States,
    changed: Collection[str],
) -> States:
    """States whose versions have no stored shard of other content.

    The versions are tried in this order: the recorded one, the modification time, the time with a hash.
    """
    different = contradicted(folder, shards, states, changed)
    with_times = states_of_files([file for file in files if file.name in different])
    states = states | with_times
    for name in contradicted(folder, shards, states, different):
        size, time = with_times[name]
        states[name] = size, f"{time}-{hash_of(Path(name))}"
    return states


def contradicted(
    folder: Path, shards: Sequence[Shard], states: States, names: Collection[str]
) -> set[str]:
    """The files among these of stored shards that were made from other content."""
    different: set[str] = set()
    if not names:
        return different
    for shard in shards:
        suspects = {piece.path for piece in shard}.intersection(names)
        if not suspects:
            continue
        stored = stored_description(folder / shard_name(shard, states))
        if stored is not None and stored.contents not in (None, hash_of_pieces(shard)):
            different |= suspects
    return different


def stored_description(folder: Path) -> ShardDescription | None:
    """The description of a stored shard; None if there is none, or a damaged one."""
    if not folder.exists():
        return None
    try:
        return TokenFiles(folder).description
    except DataError:
        return None


def hash_of_pieces(shard: Shard) -> str | None:
    """A hash of the bytes that a shard is made from; None for URLs, functions and datasets of the Hub."""
    digest = xxh3_128()
    for piece in shard:
        if not os.path.isfile(piece.path):
            return None
        with open(piece.path, "rb", buffering=0) as file:
            file.seek(piece.start)
            stop = os.fstat(file.fileno()).st_size if piece.stop is None else piece.stop + BEYOND
            while block := file.read(min(BLOCK, max(0, stop - file.tell()))):
                digest.update(block)
    return digest.hexdigest()


def find_other_place(folder: Path, like: str, files: Sequence[File]) -> str | None:
    """The store, in the same cache, of files with the same names and sizes below another folder."""
    for record in sorted(folder.parent.glob(f"*/{RECORD}")):
        if record.parent != folder and files_at_other_place(record.parent, like, files):
            return record.parent.name
    return None


def files_at_other_place(folder: Path, like: str, files: Sequence[File]) -> list[File] | None:
    """The files that a store was made from, if they differ from these only in their folder and times."""
    record = read_sealed(folder / RECORD)
    if record is None or record["like"] != like:
        return None
    other_files = []
    for name, (version, size, *_) in record["files"].items():
        other_files.append(File(name, size, version))
    return other_files if names_and_sizes(other_files) == names_and_sizes(files) else None


def names_and_sizes(files: Sequence[File]) -> list[tuple[str, int]]:
    """With names below the folder that all files are in."""
    root = commonpath([os.path.dirname(file.name) for file in files])
    return [(file.name[len(root) :], file.size) for file in files]
