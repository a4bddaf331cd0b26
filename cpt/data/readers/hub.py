"""Datasets on the Hub that are not read file by file: row by row through `datasets`."""

from collections.abc import Iterator

import orjson

from cpt.data.documents import BadRow, BadValue, Document, Origin
from cpt.data.readers.values import document_of, first_line, refuse_surrogates
from cpt.errors import DataError, ResourceError
from cpt.recipe.schema import DocumentSource


def read_hub(source: DocumentSource, key: str, commit: str) -> Iterator[Document | BadRow]:
    """The rows of a dataset, streamed where only the first are wanted.

    They come in the order of the files and of the rows in them, the same each time and for any number of processes,
    because one process reads them all from the beginning. With `streaming: true` nothing is kept but tokens; a reading
    that breaks off begins anew.

    Raises:
        DataError: there is no such dataset, split or file, or it cannot be read.
        ResourceError: the Hub cannot be reached.
    """
    import datasets  # takes a second, and `cpt check` must answer at once

    origin = Origin(source.path, "row")
    try:
        rows = datasets.load_dataset(
            source.path,
            source.subset,
            data_files=source.data_files or None,
            split=source.split,
            revision=commit,
            streaming=source.streaming or source.max_documents is not None,
        )
        for number, row in enumerate(rows, start=1):
            try:
                document = document_of(row, source, origin, number)
                refuse_surrogates(document.text)
                yield document
            except BadValue as bad:
                yield BadRow(bad.reason, bad.detail, origin, number, raw=orjson.dumps(row, default=str))
    except (FileNotFoundError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{source.path}: neither a local path nor a dataset that the Hub gives us with split `{source.split}`:"
            f" {first_line(problem)} Set `{key}.path`, `.subset`, `.split`, `.data_files` or `.revision`."
        ) from problem
    except OSError as problem:  # ConnectionError among them
        raise ResourceError(
            f"{source.path}: no such local path, and the Hub cannot be reached: {first_line(problem)}. "
            f"Go online (HF_HUB_OFFLINE is not 1), or download the dataset and set `{key}.path` to its folder."
        ) from problem
