"""Write files atomically, lock them, append lines, detect damage, and find files that ship with cpt."""

import errno
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import orjson
from xxhash import xxh3_128, xxh3_128_hexdigest

from cpt.errors import LaunchError, ResourceError

log = logging.getLogger("cpt")
SEAL = "xxh3_128"  # the key under which a JSON file keeps the hash of its other content
DAMAGED = "damaged_file"  # the kind of event
CHUNK = 1 << 20  # fits the CPU cache between reading and hashing
READ_AHEAD = 32 << 20  # prefetched while previous chunks are hashed
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks
HELD = (errno.EAGAIN, errno.EACCES)  # errors if another process holds a lock
SECONDS_BETWEEN_TRIES = 0.2  # of a lock
LEAVING = ".del-"  # prefix of a folder's name while it is removed
BLOCK = 512  # bytes, the unit of st_blocks

Content = str | bytes | Callable[[Path], object]


# --- publish a file -------------------------------------------------------------------------------


def write_atomic(
    path: Path, content: Content, *, durable: bool = False, reuse_space: bool = False
) -> None:
    """Write a file atomically, so that neither readers nor crashes see a partial file.

    Args:
        content: text, bytes, or a function that writes the file at the path it is given.
        durable: return only after the disk has the file and its name.
        reuse_space: on a full disk, overwrite the old file if it is large enough (text and bytes only). After
            an OSError the old file is unchanged.
    """
    # Containers on several hosts share process ids, and threads of a process may write the same file.
    unique = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    unfinished = path.with_name(f".{path.name}.{unique}.unfinished")
    raw = content.encode() if isinstance(content, str) else content
    try:
        if isinstance(raw, bytes):
            unfinished.write_bytes(raw)
        else:
            raw(unfinished)
        if durable:
            make_durable(unfinished)
        unfinished.replace(path)
    except OSError as problem:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        is_full = reuse_space and problem.errno in NO_SPACE
        if not (is_full and isinstance(raw, bytes) and write_over(path, raw)):
            raise
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if durable:
        make_durable(path.parent)


def free_name(path: Path) -> Path:
    """The path, with -2, -3, ... appended if it exists."""
    free = path
    number = 2
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number = number + 1
    return free


def write_over(path: Path, content: bytes) -> bool:
    """Overwrite a file's content if it needs no more space; return whether it did."""
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_WRONLY)
    try:
        held = os.fstat(descriptor)
        if len(content) > max(held.st_size, held.st_blocks * BLOCK):
            return False
        os.pwrite(
            descriptor, content.ljust(held.st_size, b"\n"), 0
        )  # padded to the old size: complete at each moment
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)
    return True


def make_durable(path: Path) -> None:
    """Wait until the disk has a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- publish a folder -----------------------------------------------------------------------------


def make_all_durable(folder: Path) -> None:
    """Wait until the disk has a folder and everything below."""
    for path in [*folder.rglob("*"), folder]:
        make_durable(path)


def rename_over(unfinished: Path, folder: Path) -> None:
    """Rename a complete folder, whose files the disk has; an older folder of that name is removed."""
    leaving = folder.with_name(f"{LEAVING}{folder.name}")
    make_durable(unfinished)
    shutil.rmtree(leaving, ignore_errors=True)
    if folder.exists():
        folder.rename(leaving)
    unfinished.rename(folder)
    make_durable(folder.parent)
    shutil.rmtree(leaving, ignore_errors=True)


@contextmanager
def replacing(old_files: Collection[Path], folder: Path) -> Iterator[Path]:
    """A scratch folder, whose files replace these files of a folder at the end."""
    with TemporaryDirectory(dir=folder.parent) as scratch:
        yield Path(scratch)
        for file in old_files:
            file.unlink()
        for file in Path(scratch).iterdir():
            shutil.move(file, folder / file.name)


def remove_folder(folder: Path) -> None:
    """Remove a folder; if killed, no partial folder remains under its name."""
    leaving = folder.with_name(f"{LEAVING}{folder.name}")
    shutil.rmtree(leaving, ignore_errors=True)
    folder.rename(leaving)
    shutil.rmtree(leaving)


# --- lock -----------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, refusal: str | None = None) -> Iterator[bool]:
    """Lock a file, until this process releases it or dies; yields False on a file system without locks.

    Args:
        refusal: the LaunchError if another process holds the lock; None waits for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            is_locked = lock_open_file(file, wait_seconds=math.inf if refusal is None else 0)
        except BlockingIOError as problem:
            raise LaunchError(str(refusal)) from problem
        yield is_locked


def lock_open_file(
    file: IO[str] | int,
    *,
    wait_seconds: float = math.inf,
    shared: bool = False,
    inherited: bool = True,
) -> bool:
    """Lock an open file until it is closed or this process dies; False on a file system without locks. Some network
    file systems have locks that do not reach other machines.

    Args:
        wait_seconds: for another process that holds the lock; then BlockingIOError.
        shared: all who share the lock may hold it at the same time.
        inherited: forked workers hold the lock too, until they end. Otherwise the file must be writable, and closing
            any file of the same path in this process releases the lock.
    """
    lock = fcntl.flock if inherited else fcntl.lockf
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if wait_seconds < math.inf:
        operation |= fcntl.LOCK_NB
    end = time.monotonic() + wait_seconds
    while True:
        try:
            lock(file, operation)
            return True
        except OSError as problem:
            if problem.errno in NO_LOCKS:
                return False
            if problem.errno not in HELD:
                raise
            if time.monotonic() >= end:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from problem
        time.sleep(SECONDS_BETWEEN_TRIES)


@contextmanager
def output_locked(folder: Path, lock: Path, command: str) -> Iterator[None]:
    """Lock a command's output folder for this process."""
    try:
        with locked(
            lock,
            f"{folder}: another `{command}` is writing there. Wait for it, or use another --output.",
        ):
            yield
    except OSError as problem:
        reason = problem.strerror or problem
        raise ResourceError(
            f"{folder}: {reason}. Free space, or use another --output."
        ) from problem


# --- lines ----------------------------------------------------------------------------------------


class LinesFile:
    """Appends lines to a file. Lines refused by a full disk wait in memory and are written before later ones.

    Threads may share it, and other processes may append to the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[str] = []
        self.lock = threading.Lock()

    def add(self, line: str) -> None:
        with self.lock:
            self.waiting.append(f"{line}\n")
            problem = self._write()
            if problem:
                log.warning(
                    "%s cannot be written: %s. Its lines wait for the next one.",
                    self.path,
                    problem.strerror,
                )

    def write_waiting(self) -> int:
        """Retry writing waiting lines; return the number still waiting."""
        with self.lock:
            self._write()
            return len(self.waiting)

    def _write(self) -> OSError | None:
        if not self.waiting:
            return None
        try:
            append(self.path, "".join(self.waiting))
        except OSError as problem:
            return problem
        self.waiting.clear()
        return None


def append(path: Path, text: str) -> None:
    """Append the whole text or none of it, in one write, so that lines of several processes do not mix.

    Terminates a partial last line first. OSError if the disk is full or not writable.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        is_cut_off = size > 0 and os.pread(descriptor, 1, size - 1) not in (b"\n", b"")
        content = text.encode()
        if is_cut_off:
            content = b"\n" + content
        num_bytes = os.write(descriptor, content)
        if num_bytes < len(content):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            # If the file is longer, another process has ended the partial line.
            if os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, end - num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of a JSON Lines file, None for a damaged line; OSError if it cannot be read."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield parse_object(line)


def parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        content = orjson.loads(line)
    except ValueError:
        try:
            content = json.loads(line)  # accepts NaN and Infinity, which Python writes
        except (ValueError, RecursionError):
            return None
    if isinstance(content, dict):
        return content
    return None


# --- damage ---------------------------------------------------------------------------------------


def sealed(content: dict[str, Any], indent: int | None = None) -> str:
    """Return the content as JSON, with its hash."""
    seal = key_of(json.loads(json.dumps(content, default=str)))
    return json.dumps({**content, SEAL: seal}, indent=indent, default=str)


def unsealed(text: str | bytes) -> dict[str, Any]:
    """Return the content of `sealed` without the hash; ValueError if the text is damaged."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop(SEAL, None) != key_of(content):
        raise ValueError("its content does not match its hash")
    return content


def key_of(content: dict[str, Any]) -> str:
    """Hash the content; the hash names the folder of the described data."""
    return xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def intact_content(path: Path) -> dict[str, Any] | None:
    """The content of a sealed file; None if it is missing or damaged."""
    try:
        return unsealed(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Read a derived file; None if it is missing, or damaged, which is logged."""
    content = intact_content(path)
    if content is None and os.path.exists(path):
        report_damage(path)
    return content


def report_damage(path: Path) -> None:
    """Log that a file or folder is made again; during a run, this is also an event."""
    log.warning(f"{path} is damaged and is made again.", extra={"event": DAMAGED})


# --- hashes of files ------------------------------------------------------------------------------

HashFile = Callable[[Path], str]
HASHED_AT_ONCE = 4


def files_in(folder: Path) -> dict[str, Path]:
    """Path relative to the folder -> file, for all files below."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def size_and_hash(path: Path) -> tuple[int, str]:
    """Size and xxh3-128 of a file; releases the GIL."""
    digest = xxh3_128()
    size = 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, READ_AHEAD, os.POSIX_FADV_WILLNEED)
        while num_bytes := stream.readinto(buffer):
            if size % READ_AHEAD == 0:
                os.posix_fadvise(
                    stream.fileno(), size + READ_AHEAD, READ_AHEAD, os.POSIX_FADV_WILLNEED
                )
            digest.update(buffer[:num_bytes])
            size += num_bytes
    return size, digest.hexdigest()


def hash_of(path: Path) -> str:
    """The xxh3-128 of a file."""
    _, digest = size_and_hash(path)
    return digest


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def hashes_of(files: Mapping[str, Path], hash_file: HashFile = hash_of) -> dict[str, str]:
    """Name -> hash; hash functions release the GIL, so several files are read at the same time."""
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))


def differing_files(hashes: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Names of the files that changed or are missing or new, from the hashes of two times."""
    names = hashes.keys() | others.keys()
    return sorted(name for name in names if hashes.get(name) != others.get(name))


# --- unchanged files ------------------------------------------------------------------------------

Signature = tuple[int, int, int, int]


def signature_of(path: str | Path) -> Signature:
    """Size, mtime, inode and ctime: a write changes the ctime, even if it restores the mtime."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


class KnownHashes:
    """Hashes of files, in a sealed file together with the signatures: an unchanged file is not read again.

    Without that file, or on another disk, all files are read again.
    """

    def __init__(self, path: Path, hash_file: HashFile = hash_of) -> None:
        self.path = path
        self.hash_file = hash_file
        self.known = read_sealed(path) or {}

    def hashes(self, files: Mapping[str, Path]) -> dict[str, str]:
        """Name -> hash of these files, which exist; new hashes are recorded."""
        unknown = {name: path for name, path in files.items() if self.known_hash(path) is None}
        signatures = {name: signature_of(path) for name, path in unknown.items()}
        read = hashes_of(unknown, self.hash_file)
        for name, path in unknown.items():
            self.known[str(path.absolute())] = [read[name], *signatures[name]]
        if unknown:
            self.write()
        return {name: self.known[str(path.absolute())][0] for name, path in files.items()}

    def record(self, files: Mapping[str, Path], hashes: Mapping[str, str]) -> None:
        """Record the hashes of files that were just written."""
        for name, path in files.items():
            self.known[str(path.absolute())] = [hashes[name], *signature_of(path)]
        self.write()

    def known_hash(self, path: Path) -> str | None:
        digest, *signature = self.known.get(str(path.absolute()), [None])
        if tuple(signature) == signature_of(path):
            return digest
        return None

    def write(self) -> None:
        with suppress(OSError):  # a full disk or a read-only folder costs time at the next start
            write_atomic(self.path, sealed(self.known), reuse_space=True)


# --- files that ship with cpt ----------------------------------------------------------------------------


def find_shipped_files() -> Path:
    """The folder of `recipes/`, `deepspeed_configs/` and `launch/`: setup.py adds them to the wheel, a clone has
    them at its top."""
    package = Path(__file__).resolve().parent
    installed = package / "shipped"
    if installed.is_dir():
        return installed
    return package.parent


SHIPPED_FILES = find_shipped_files()


def training_program() -> str:
    """The arguments after `accelerate launch` or `torchrun` for `cpt train`, from the current folder."""
    if Path("cpt/train.py").is_file():
        return "cpt/train.py"
    return "-m cpt.train"
