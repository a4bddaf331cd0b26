"""Which held-out sets show what was learned, and which show what was kept."""

from cpt.data.readers.sources import files_of, kind_of, open_source
from cpt.errors import CptError
from cpt.recipe.paths import TEXT_FILES, format_of
from cpt.recipe.rules import name_of_path, reported_name
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.runs.folder import Content, get, get_dict

WRITTEN_BY = "model_sha256"  # column of the texts that `cpt data generate-replay` writes
OF_A_TEXT = "style"  # further column of `cpt data rewrite`: the text has the content of a document


def general_sets(recipe: Content, inputs: Content) -> set[str]:
    """Names of the sets that are not the domain: those of `evaluation.retain`, sources with `replay_kl`, and texts
    that a model wrote on its own. Takes the recipe and inputs.json of a run, as they were read."""
    names = set(get_dict(recipe, "evaluation", "retain"))
    for source in get(recipe, "data", "sources") or []:
        if get(source, "replay_kl"):
            names.add(get(source, "name") or name_of_path(str(get(source, "path"))))
    return names | set(get(inputs, "data", "written_by_model") or [])


def domain_weights(recipe: Recipe, names: list[str]) -> list[float]:
    """The weights of the sources from which sets are held out; equal ones if a set is of no source."""
    weights = {reported_name(source): source.weight for source in recipe.data.sources}
    if recipe.evaluation.held_out_share is None or not set(names) <= weights.keys():
        return [1.0] * len(names)
    return [weights[name] for name in names]


def written_by_model(recipe: Recipe) -> list[str]:
    """Names of the sources and held-out sets whose rows record that a model wrote them on its own."""
    names = []
    for source in (*recipe.data.sources, *recipe.evaluation.perplexity):
        if kind_of(source.path) == "local" and is_written_by_model(source):
            names.append(reported_name(source))
    return names


def is_written_by_model(source: DocumentSource) -> bool:
    try:
        first_file = files_of(source, "path")[0].name
    except (CptError, IndexError):
        return False
    if format_of(first_file) in {*TEXT_FILES, ""}:  # no columns
        return False
    return has_column(first_file, WRITTEN_BY) and not has_column(first_file, OF_A_TEXT)


def has_column(file: str, column: str) -> bool:
    """Whether the first row of a file has a text in this column."""
    try:
        documents = open_source(DocumentSource(path=file, text_column=column), "path")
        return next(documents, None) is not None
    except CptError:
        return False
