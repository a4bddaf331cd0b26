"""Whether the archive takes what is copied there, and gives it back: tried with a file of eight megabytes."""

import os
import threading
import time
from pathlib import Path
from tempfile import NamedTemporaryFile

import fsspec

from cpt.checkpoints.archive import put
from cpt.errors import CheckpointError, ResourceError
from cpt.rehearsal.table import Finding, bad, good

PROBE_BYTES = 8 << 20
PATIENCE_SECONDS = 120.0


def judge_archive(place: str) -> Finding:
    """Write, read back, remove; no checkpoint that is there is touched."""
    answers: list[Finding] = []
    thread = threading.Thread(target=lambda: answers.append(probe(place)), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    remedy = "Mend it, set `checkpoints.archive` elsewhere, or to null"
    return (
        answers[0]
        if answers
        else bad("archive", ResourceError(f"{place} did not answer within {PATIENCE_SECONDS:.0f} s. {remedy}."))
    )


def probe(place: str) -> Finding:
    """One file."""
    content, began = os.urandom(PROBE_BYTES), time.perf_counter()
    try:
        files, root = fsspec.core.url_to_fs(place)
        target = f"{root}/.rehearsal-{os.getpid()}"
        try:
            with NamedTemporaryFile() as source:
                source.write(content)
                source.flush()
                put(files, Path(source.name), f"{target}/probe", PROBE_BYTES)
            if files.cat_file(f"{target}/probe") != content:
                raise CheckpointError(f"{target}/probe does not hold what was written")
        finally:
            if files.exists(target):
                files.rm(target, recursive=True)
    except Exception as problem:  # of whatever storage it is
        text = f"`checkpoints.archive`: nothing can be copied to {place}: {type(problem).__name__}: {problem}"
        return bad(
            "archive", ResourceError(f"{text}. The run would go on without it: mend it, set it elsewhere, or to null.")
        )
    return good(
        "archive", f"{PROBE_BYTES >> 20} MiB written to {place} and read back in {time.perf_counter() - began:.1f} s"
    )
