"""What is wrong with the recipe's files, told before anything is loaded: only names, sizes and first rows are read."""

from collections import Counter
from collections.abc import Iterator

from cpt.data.filters import FilterLists, build_filters, reason_to_drop
from cpt.data.sources import AnySource, find_files, is_local, name_of, read_file, refuse_empty
from cpt.errors import CptError, RecipeError
from cpt.recipe.schema import Data, Evaluation, Source

FILES_OPENED = 20  # of one source; of the others only name and size are looked at


def check_sources(data: Data, evaluation: Evaluation) -> list[str]:
    """Every complaint about names, filters, local files and their columns; imports neither torch nor transformers nor datasets."""
    complaints: list[str] = []
    try:
        check_names(data, evaluation)
    except RecipeError as problem:
        complaints.append(str(problem))
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


def check_names(data: Data, evaluation: Evaluation) -> None:
    """Refuse two sources, or two held-out sets, of one name: reports could not tell them apart.

    Raises:
        RecipeError: a name is there twice.
    """
    sources, held_out = ([name_of(source) for source in section] for section in (data.sources, evaluation.perplexity))
    groups = {"data.sources": sources, "evaluation.perplexity": held_out}
    if evaluation.held_out_share is not None:  # then each source has a held-out set of its name
        groups["data.sources` and `evaluation.perplexity"] = list({*sources}) + held_out
    for where, names in groups.items():
        twice = [f"`{name}`" for name, count in Counter(names).items() if count > 1]
        if twice:
            raise RecipeError(f"`{where}`: {', '.join(twice)} is the name of more than one. Give each a `name:` of its own.")


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
                reason_to_drop({"text": first[1], "source": name_of(source), "where": first[0]}, checks)
        except CptError as problem:
            complaints.append(str(problem))
    return complaints
