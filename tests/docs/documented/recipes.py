"""A YAML block is a recipe that loads, a part that fits into one, a pipeline, or a search space; its names and options
exist."""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpt.data.filters.filters import build_filters, build_transforms
from cpt.errors import CptError, RecipeError
from cpt.evaluation.tasks import DOMAIN_TEST, domain_test_of_recipe, task_of_recipe
from cpt.extend import check_options
from cpt.pipeline.steps import load_pipeline
from cpt.preflight.found import PreflightReport
from cpt.preflight.gate import check_names
from cpt.recipe.load import load_recipe, load_with_places
from cpt.recipe.schema import Component, Data, Recipe
from cpt.recipe.sections import keys_of
from cpt.recipe.tree import Mistakes, plain
from cpt.recipe.yaml_lines import UnreadableError, read_text
from cpt.search.space import load_space, recipes_at_ends
from documented.blocks import Block, PageError

SMALL: dict[str, Any] = {
    "name": "part",
    "model": {"path": "a/b"},
    "tokenizer": {"path": "a/b"},
    "data": {"sources": [{"path": "a/b"}]},
    "budget": {"tokens": 100_000_000_000},
}
STAGES = ("cpt", "pretrain", "sft", "dpo", "grpo", "distill")
"""A part of a recipe that does not say its stage fits one of these; rewards are of the one."""
OF_THE_READERS = re.compile(r"cannot import `(?!cpt[.`])")


def check_yaml(block: Block, folder: Path, root: Path) -> None:
    """Read it as cpt would.

    Args:
        folder: where the page's files are; recipes that it names are looked for there, then in the repository.
        root: the repository.

    Raises:
        PageError: cpt would refuse it.
    """
    kind = block.settings.get("yaml")
    if kind == "any":
        read_plain(block)
        return
    written = read_plain(block)
    if not isinstance(written, dict):
        raise PageError(
            f"{block.place}: a recipe or a part of one has keys; for other YAML write <!-- yaml: any --> before it"
        )
    try:
        if "steps" in written:
            load_pipeline(placed(block, folder))
        elif "search" in written:
            load_space(placed(block, folder))
        elif kind:
            check_recipe(on_top_of(root / kind, written, folder), ())
        elif {"name", "model", "data", "budget"} <= written.keys() or {"base", "name"} <= written.keys():
            check_recipe(placed(block, folder), ())
        else:
            check_part(block, written, folder)
    except CptError as problem:
        raise PageError(f"{block.place}: {problem}") from problem


def read_plain(block: Block) -> Any:
    """The values, with cpt's own reading of YAML: a key written twice is a mistake."""
    mistakes = Mistakes()
    try:
        written = plain(read_text(block.text.encode(), block.place, mistakes))
        mistakes.raise_if_any()
    except (CptError, UnreadableError) as problem:
        mistakes.raise_if_any()
        raise PageError(f"{block.place}: {problem}") from problem
    return written


def placed(block: Block, folder: Path) -> Path:
    """The block as a file: where its page puts it, so that the paths in it mean what they say."""
    path = folder / block.settings.get("file", ".block.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    return path


def check_part(block: Block, written: dict[str, Any], folder: Path) -> None:
    """Lay the part over the smallest recipe, of a stage that it fits."""
    if not written.keys() & keys_of(Recipe).keys():
        raise PageError(
            f"{block.place}: {', '.join(written)}: no keys of a recipe; for other YAML write <!-- yaml: any -->"
            " before it"
        )
    complaints = []
    for stage in [written["stage"]] if "stage" in written else ["grpo"] if "rewards" in written else STAGES:
        recipe = {**SMALL, "stage": stage, **{key: over(SMALL.get(key), value) for key, value in written.items()}}
        try:
            check_recipe(written_to(folder, recipe), ())
        except CptError as problem:
            complaints.append(problem)
        else:
            return
    raise complaints[0]


def written_to(folder: Path, recipe: dict[str, Any]) -> Path:
    """The values as a file."""
    path = folder / ".part.yaml"
    path.write_text(json.dumps(recipe, ensure_ascii=False))
    return path


def over(below: Any, value: Any) -> Any:
    """A section on top of another; a model with a shape of its own needs no path."""
    if isinstance(below, dict) and isinstance(value, dict) and not value.keys() & {"config", "base", "epochs"}:
        return {**below, **value}
    return value


def on_top_of(recipe: Path, written: dict[str, Any], folder: Path) -> Path:
    """The part on a recipe that the page names."""
    if not recipe.is_file():
        raise PageError(f"<!-- yaml: {recipe.name} -->: no such recipe")
    below = json.loads(load_recipe(recipe).model_dump_json(by_alias=True, exclude_unset=True))
    return written_to(folder, {**below, **{key: over(below.get(key), value) for key, value in written.items()}})


def check_overrides(recipe: Path | None, overrides: Sequence[str]) -> None:
    """`key=value` on top of the recipe, or of the smallest one where it is still to be written."""
    if recipe is not None:
        check_recipe(recipe, overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        check_recipe(written_to(Path(folder), SMALL), overrides)


def check_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Shape, sense, and the names and options of what cpt brings; what is the reader's own, or of a GPU, is not here.

    Raises:
        RecipeError: all mistakes.
    """
    recipe = load_recipe(path, overrides)
    found = PreflightReport()
    check_names(recipe, found, None)
    for build, lists in parts_by_name(recipe.data):
        for key, components in lists.items():
            for number, component in enumerate(components):
                found.run(lambda build=build, key=f"{key}[{number}]", component=component: build({key: [component]}))
    for number, task in enumerate(recipe.evaluation.tasks):
        options_of = domain_test_of_recipe if task.name == DOMAIN_TEST else task_of_recipe
        found.run(
            lambda of=options_of, task=task, key=f"evaluation.tasks[{number}]": check_options(of, task.options, key)
        )
    mistakes = [
        str(mistake)
        for mistake in found.mistakes
        if isinstance(mistake, RecipeError) and not OF_THE_READERS.search(str(mistake))
    ]
    if mistakes:
        raise RecipeError("\n".join(mistakes))


def parts_by_name(data: Data) -> list[tuple[Callable[..., Any], dict[str, list[Component]]]]:
    """What builds a kind of part, and where its lists stand in the recipe."""
    sources = {f"data.sources[{number}]": source for number, source in enumerate(data.sources)}
    filters = {"data.filters": data.filters} | {f"{key}.filters": source.filters for key, source in sources.items()}
    transforms = {"data.transforms": data.transforms} | {
        f"{key}.transforms": source.transforms for key, source in sources.items()
    }
    return [(build_filters, filters), (build_transforms, transforms)]


def check_space(space: Path, recipe: Path) -> None:
    """A space fits the recipe that it is to be tried on."""
    recipes_at_ends(load_space(space), load_with_places(recipe)[1])
