"""What is wrong with the recipe's files, told before anything is loaded: only names, sizes and first rows are read."""

from collections import Counter
from collections.abc import Iterator

from cpt.data.checking.bad_rows import complaint
from cpt.data.documents import BadRow, Document
from cpt.data.filters import FilterLists, build_filters, reason_to_drop
from cpt.data.readers.function import find_function
from cpt.data.readers.values import columns_of
from cpt.data.sources import Piece, files_with_sizes, kind_of, read_piece
from cpt.data.transforms import TransformLists, apply_transforms, build_transforms
from cpt.errors import CptError
from cpt.recipe.schema import Data, DocumentSource, Evaluation, Source
from cpt.recipe.sense_data import reported_name

FILES_OPENED = 20  # of one source; of the others only name and size are looked at
UNCHECKED = {"hub": "Hub", "url": "remote"}


def check_sources(data: Data, evaluation: Evaluation) -> list[str]:
    """Every complaint about filters, local files and their columns; imports neither torch nor transformers nor datasets."""
    complaints: list[str] = []
    for key, source in keyed_sources(data, evaluation):
        filters, transforms = filters_of(data, source, key), transforms_of(data, source, key)
        complaints += check_source(source, filters, transforms, key, refuse_bad_rows=data.on_bad_row == "error")
    return list(dict.fromkeys(complaints))


def unchecked_sources(data: Data, evaluation: Evaluation) -> list[str]:
    """The sources on the Hub and other servers, which nobody has looked at."""
    keyed = [(key, source, UNCHECKED.get(kind_of(source.path))) for key, source in keyed_sources(data, evaluation)]
    return [f"`{key}.path`: {source.path} ({place})" for key, source, place in keyed if place]


def keyed_sources(data: Data, evaluation: Evaluation) -> Iterator[tuple[str, DocumentSource]]:
    """Each source and held-out set with its place in the recipe."""
    yield from ((f"data.sources[{number}]", source) for number, source in enumerate(data.sources))
    yield from ((f"evaluation.perplexity[{number}]", held_out) for number, held_out in enumerate(evaluation.perplexity))


def filters_of(data: Data, source: DocumentSource, key: str) -> FilterLists:
    """The filters that a source's documents pass, with their places in the recipe; held-out sets are taken as they are."""
    return {"data.filters": data.filters, f"{key}.filters": source.filters} if isinstance(source, Source) else {}


def transforms_of(data: Data, source: DocumentSource, key: str) -> TransformLists:
    """The transforms that a source's documents pass; those for all sources pass held-out sets too, so that equal texts stay equal."""
    own = {f"{key}.transforms": source.transforms} if isinstance(source, Source) else {}
    return {"data.transforms": data.transforms, **own}


def check_source(
    source: DocumentSource, filters: FilterLists, transforms: TransformLists, key: str, *, refuse_bad_rows: bool = True
) -> list[str]:
    """The complaints about one source: its filters and transforms, their options, its template, its function, then its files."""
    try:
        checks, changes = build_filters(filters), build_transforms(transforms)
        columns_of(source)
        if kind_of(source.path) == "function":
            find_function(source, key)
        files = files_with_sizes(source, key) if kind_of(source.path) == "local" else []
    except CptError as problem:
        return [str(problem)]
    complaints = []
    for number, (file, size) in enumerate(files):
        if number >= FILES_OPENED and size:
            continue
        try:
            first = next(read_piece(source, Piece(file, 0, None, 0), key), None)
            if isinstance(first, BadRow) and refuse_bad_rows:
                complaints.append(complaint(first, key))
            elif isinstance(first, Document) and number == 0:  # also tells of a filter or transform that cannot run
                view = {"text": first.text, "source": reported_name(source), "where": first.where}
                for changed in apply_transforms(view, changes, Counter()):
                    reason_to_drop(changed, checks)
        except CptError as problem:
            complaints.append(str(problem))
    return complaints
