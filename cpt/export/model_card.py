"""The README.md of an export: data with their licences, recipe, base, figures, limits, and how to serve it."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment

from cpt.evaluation.callbacks import read_course
from cpt.files import write_atomic
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_local
from cpt.recipe.schema import Recipe
from cpt.runs.folder import ENVIRONMENT, EXPORT, INPUTS, METRICS, RECIPE, VERDICT_PAGE, get, get_dict, read_object

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
UNKNOWN_LICENCE = "not stated"

# Held-out set -> bits per byte before the first step and after the last.
Evaluations = dict[str, tuple[float | None, float]]


def write_model_card(
    folder: Path, run: Path | None, name: str, *, step: int | None = None, adapter: bool = False
) -> None:
    """Write README.md into an exported folder: of the checkpoint of a step, or of the run's end. Without a run, data,
    recipe and figures are unknown."""
    recipe = None if run is None else load_recipe(run / RECIPE)
    environment = {} if run is None else read_object(run / ENVIRONMENT)
    sources = {} if run is None else get_dict(read_object(run / INPUTS), "data", "sources")
    course = [] if run is None else read_course(run / METRICS)
    before = course[0].bits_per_byte if course and course[0].step == 0 else {}
    after = [point for point in course if step is None or point.step == step][-1:]
    evaluations: Evaluations = {
        name: (before.get(name) if point.step else None, value)
        for point in after
        for name, value in point.bits_per_byte.items()
    }
    base = None if recipe is None else recipe.model.path
    written = {} if recipe is None else recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    verdict = ""
    if run is not None and step is None and (run / VERDICT_PAGE).is_file():
        page = (run / VERDICT_PAGE).read_text(encoding="utf-8").strip()
        verdict = re.sub(r"^#+ ", lambda marks: f"##{marks[0]}", page, flags=re.MULTILINE)
    environment_of_page = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    page = environment_of_page.from_string(template).render(
        header=card_data(name, recipe, evaluations, adapter).to_yaml(),
        name=name,
        served=name if folder.name.startswith(".") or folder.name == EXPORT else folder.name,
        is_adapter=adapter,
        recipe=recipe,
        written_recipe=yaml.safe_dump(written, sort_keys=False, allow_unicode=True).strip(),
        base=base,
        is_new=recipe is not None and (base is None or recipe.model.from_scratch),
        licence=base_licence(base),
        unknown_licence=UNKNOWN_LICENCE,
        sources=sources,
        unlicensed=", ".join(name for name, source in sources.items() if not source.get("licence")),
        versions=", ".join(f"{name} {number}" for name, number in get_dict(environment, "versions").items() if number),
        commit=get(environment, "git", "commit"),
        step=step,
        evaluations=evaluations,
        verdict=verdict,
    )
    write_atomic(folder / "README.md", str(ModelCard(page)), reuse_space=True)


def card_data(name: str, recipe: Recipe | None, evaluations: Evaluations, adapter: bool) -> ModelCardData:
    """The header that the Hub reads."""
    base = None if recipe is None else recipe.model.path
    paths: Iterable[str | None] = [] if recipe is None else [base, *(source.path for source in recipe.data.sources)]
    on_hub = {path for path in paths if path and HUB_ID.fullmatch(path) and not Path(path).exists()}
    metric: dict[str, Any] = {"metric_type": "bits_per_byte", "metric_name": "bits per byte"}
    figures = [
        EvalResult("text-generation", **metric, dataset_type=name, dataset_name=name, metric_value=round(after, 5))
        for name, (_, after) in evaluations.items()
    ]
    return ModelCardData(
        model_name=name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if base in on_hub else None,
        datasets=sorted(on_hub - {base}) or None,
        license=base_licence(base),
        tags=["cpt", *([] if recipe is None else ["continued-pretraining" if base else "pretraining"])],
        eval_results=figures or None,
    )


def base_licence(base: str | None) -> str | None:
    """The licence in the card beside the base's weights; it applies to what is made from them."""
    card = Path(base).expanduser() / "README.md" if base is not None and is_local(base) else None
    if card is None or not card.is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (ValueError, yaml.YAMLError):  # not the Hub's header
        return None
    return licence if isinstance(licence, str) else None
