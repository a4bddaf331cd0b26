"""The folder for rewritten texts: a file for each group of texts, and its counts in `.rewrite`, which sources skip."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from cpt.errors import RecipeError
from cpt.files import output_locked, write_atomic

OWN_FOLDER = ".rewrite"


@dataclass(frozen=True)
class RewriteCounts:
    texts: int
    """That were made."""
    dropped: Mapping[str, int]
    """Reason -> texts of which nothing was kept."""


class RewrittenFolder:
    """The groups of one output folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, folder / OWN_FOLDER

    def find(self, number: int, asked: Sequence[str]) -> RewriteCounts | None:
        """What an earlier run made of these texts, if it did."""
        counts, made = self._counts_file(number), self._file(number)
        if not counts.exists():
            return None
        found = orjson.loads(counts.read_bytes())
        # An empty group has no file: sources take one for a mistake.
        if found["asked_sha256"] != hash_of(asked) or made.exists() != (found["texts"] > 0):
            return None
        return RewriteCounts(found["texts"], found["dropped"])

    def write(
        self, number: int, rows: Sequence[Mapping[str, object]], asked: Sequence[str], counts: RewriteCounts
    ) -> None:
        """First the texts, then that they are there."""
        self._counts_file(number).unlink(missing_ok=True)
        if rows:
            write_atomic(self._file(number), b"".join(orjson.dumps(row) + b"\n" for row in rows), durable=True)
        else:
            self._file(number).unlink(missing_ok=True)
        what = {"asked_sha256": hash_of(asked), "texts": counts.texts, "dropped": counts.dropped}
        write_atomic(self._counts_file(number), orjson.dumps(what), durable=True)

    def remove_after(self, last: int) -> None:
        """Remove groups that an earlier run made of a source that was longer then."""
        number = last + 1
        while self._counts_file(number).exists() or self._file(number).exists():
            self._file(number).unlink(missing_ok=True)
            self._counts_file(number).unlink(missing_ok=True)
            number += 1

    def _file(self, number: int) -> Path:
        return self._folder / f"rewritten-{number:05}.jsonl"

    def _counts_file(self, number: int) -> Path:
        return self._own / f"{number:05}.json"


def hash_of(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


@contextmanager
def open_output(folder: Path, task: Mapping[str, object]) -> Iterator[RewrittenFolder]:
    """The folder, for this process and this task alone.

    Raises:
        RecipeError: it holds texts of another task.
        LaunchError: another process fills it.
        ResourceError: the disk is full or not writable.
    """
    own = folder / OWN_FOLDER
    with output_locked(folder, own / "lock", "cpt data rewrite"):
        check_task(own / "task.json", task)
        yield RewrittenFolder(folder)


def check_task(file: Path, task: Mapping[str, object]) -> None:
    """Texts of different tasks are never mixed in one folder."""
    now = orjson.loads(orjson.dumps(task))
    if not file.exists():
        write_atomic(file, orjson.dumps(now, option=orjson.OPT_INDENT_2))
        return
    before = orjson.loads(file.read_bytes())
    if differing := sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key)):
        raise RecipeError(
            f"{file.parent.parent} holds texts that were made otherwise ({', '.join(differing)} differ). Give another"
            " --output."
        )
