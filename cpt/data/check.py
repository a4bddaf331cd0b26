"""What is wrong with the recipe's files, told before anything is loaded: only names, sizes and first rows are read."""

from collections.abc import Iterator

from cpt.data.filters import FilterLists, build_filters, reason_to_drop
from cpt.data.sources import AnySource, find_files, is_local, read_file, refuse_empty
from cpt.errors import CptError
from cpt.recipe.schema import Data, Evaluation, Source
from cpt.recipe.sense import reported_name

FILES_OPENED = 20  # of one source; of the others only name and size are looked at


def check_sources(data: Data, evaluation: Evaluation) -> list[str]:
    """Every complaint about filters, local files and their columns; imports neither torch nor transformers nor datasets."""
    complaints: list[str] = []
    for key, source in keyed_sources(data, evaluation):
        complaints += check_source(source, filters_of(data, source, key), key)
    return list(dict.fromkeys(complaints))


def unchecked_sources(data: Data, evaluation: Evaluation) -> list[str]:
    """The sources on the Hub, which nobody has looked at."""
    return [f"`{key}.path`: {source.path} (Hub)" for key, source in keyed_sources(data, evaluation) if not is_local(source.path)]


def keyed_sources(data: Data, evaluation: Evaluation) -> Iterator[tuple[str, AnySource]]:
    """Each source and held-out set with its place in the recipe."""
    yield from ((f"data.sources[{number}]", source) for number, source in enumerate(data.sources))
    yield from ((f"evaluation.perplexity[{number}]", held_out) for number, held_out in enumerate(evaluation.perplexity))


def filters_of(data: Data, source: AnySource, key: str) -> FilterLists:
    """The filters that a source's documents pass, with their places in the recipe; held-out sets are taken as they are."""
    return {"data.filters": data.filters, f"{key}.filters": source.filters} if isinstance(source, Source) else {}


def check_source(source: AnySource, filters: FilterLists, key: str) -> list[str]:
    """The complaints about one source: its filters' names and options, then its files."""
    try:
        checks = build_filters(filters)
        files = find_files(source, key) if is_local(source.path) else []
    except CptError as problem:
        return [str(problem)]
    complaints = []
    for number, file in enumerate(files):
        try:
            refuse_empty(file, len(files), key)
            first = next(read_file(file, source.text_column, key), None) if number < FILES_OPENED else None
            if first is not None and number == 0:  # also tells of a filter that cannot run
                reason_to_drop({"text": first[1], "source": reported_name(source), "where": first[0]}, checks)
        except CptError as problem:
            complaints.append(str(problem))
    return complaints
