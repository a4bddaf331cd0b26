"""The README.md of an export: data with their licences, recipe, base, figures, limits, and how to serve it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from cpt.files import write_atomic
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_local
from cpt.recipe.schema import Recipe
from cpt.runs.folder import (
    ENVIRONMENT,
    EXPORT,
    INPUTS,
    METRICS,
    RECIPE,
    VERDICT_PAGE,
    get,
    get_dict,
    read_object,
    read_objects,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FIGURE = re.compile(r"eval_(.+)_bits_per_byte")
LICENCE_NOT_KNOWN = "not stated"
PAGE = """---
{header}
---

# {name}

{introduction}

## Data

{data}

{recipe}## Evaluation

{evaluation}

{verdict}## Limits

- It continues text. This run did not teach it to refuse, to be truthful or to follow instructions.
- It repeats what its data say, errors and personal data included. The figures above are those of the named sets only.
{limits}
{use}
"""
SERVE = """## Serve

```bash
cpt serve {name}            # or: transformers serve {name}, vllm serve {name}
curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 64}}'
```"""
USE_ADAPTER = """## Use

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```

It needs the base model that `adapter_config.json` names; `base_weights.json` holds the sha256 of its files.
One model of both: `cpt merge --method lora BASE ADAPTER --output FOLDER`."""


@dataclass(frozen=True)
class Judgement:
    name: str
    before: float | None
    after: float


def write_model_card(
    folder: Path, run: Path | None, name: str, *, step: int | None = None, adapter: bool = False
) -> None:
    """Write README.md into an exported folder.

    Args:
        run: the folder of the run that trained it, for the data, the recipe and the figures; None if there is none.
        name: of the model.
        step: of the exported checkpoint; None: the run's end.
        adapter: the folder holds an adapter instead of a model.
    """
    recipe = None if run is None else load_recipe(run / RECIPE)
    sources = {} if run is None else get_dict(read_object(run / INPUTS, []), "data", "sources")
    judgements = [] if run is None else read_judgements(run / METRICS, step)
    served = name if folder.name.startswith(".") or folder.name == EXPORT else folder.name
    page = PAGE.format(
        header=card_data(name, recipe, judgements, adapter).to_yaml(),
        name=name,
        introduction=introduction(recipe, adapter),
        data=data_table(sources),
        recipe="" if run is None or recipe is None else recipe_part(run, recipe, step),
        evaluation=evaluation_table(judgements, step),
        verdict="" if run is None or step is not None else verdict_part(run / VERDICT_PAGE),
        limits=further_limits(recipe, sources),
        use=(USE_ADAPTER if adapter else SERVE).format(name=served),
    )
    write_atomic(folder / "README.md", str(ModelCard(page)), reuse_space=True)


def card_data(name: str, recipe: Recipe | None, judgements: list[Judgement], adapter: bool) -> ModelCardData:
    """The header that the Hub reads."""
    base = None if recipe is None else recipe.model.path
    paths = [*([base] if base else []), *([] if recipe is None else [source.path for source in recipe.data.sources])]
    on_hub = {path for path in paths if HUB_ID.fullmatch(path) and not Path(path).exists()}
    figures = [
        EvalResult(
            task_type="text-generation",
            dataset_type=judgement.name,
            dataset_name=judgement.name,
            metric_type="bits_per_byte",
            metric_name="bits per byte",
            metric_value=round(judgement.after, 5),
        )
        for judgement in judgements
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
    """The licence in the card beside the base's weights; it holds for what is made from them."""
    card = Path(base).expanduser() / "README.md" if base is not None and is_local(base) else None
    if card is None or not card.is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (ValueError, yaml.YAMLError):  # not the Hub's header
        return None
    return licence if isinstance(licence, str) else None


def introduction(recipe: Recipe | None, adapter: bool) -> str:
    if recipe is None:
        return "Exported by cpt from weights that no run of cpt's trained; nothing is known here of their data."
    base, what = recipe.model.path, "A LoRA adapter" if adapter else "A causal language model"
    is_new = base is None or recipe.model.from_scratch
    came = "trained from new weights" if is_new else f"continued from `{base}`"
    licence = base_licence(base) or f"{LICENCE_NOT_KNOWN} here; read its card before you share this"
    of_base = f" Licence of the base: {licence}." if base is not None else ""
    return (
        f"{what}, {came} by the run `{recipe.name}` (stage `{recipe.stage}`). {recipe.description}{of_base}".rstrip()
    )


def data_table(sources: Mapping[str, Any]) -> str:
    if not sources:
        return "Not recorded."
    rows = [
        f"| {name} | {one.get('licence') or LICENCE_NOT_KNOWN} | {one['share']:.1%} | {one['documents']:,} |"
        f" {one['tokens']:,} |"
        for name, one in sources.items()
    ]
    head = [
        "| source | licence | share of the training tokens | documents | tokens |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


def recipe_part(run: Path, recipe: Recipe, step: int | None) -> str:
    environment = read_object(run / ENVIRONMENT, [])
    versions = ", ".join(f"{name} {number}" for name, number in get_dict(environment, "versions").items() if number)
    commit = get(environment, "git", "commit")
    made = f"Made with {versions}" + (f"; commit `{commit}`." if commit else ".")
    if step is not None:
        made += f" The model was taken at step {step:,}."
    content = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    written = yaml.safe_dump(content, sort_keys=False, allow_unicode=True).strip()
    return f"## Recipe\n\n{made}\n\n```yaml\n{written}\n```\n\n"


def evaluation_table(judgements: list[Judgement], step: int | None) -> str:
    if not judgements:
        return "Not evaluated" + ("." if step is None else f" at step {step:,}.")
    what = "Bits per byte on held-out documents (lower is better; comparable between tokenizers):"
    rows = [
        f"| {one.name} | {'-' if one.before is None else f'{one.before:.4f}'} | {one.after:.4f} |"
        for one in judgements
    ]
    return "\n".join([what, "", "| held-out set | before | after |", "| --- | --- | --- |", *rows])


def verdict_part(page: Path) -> str:
    """The run's verdict, without the pictures, which stay in the run's folder."""
    if not page.is_file():
        return ""
    text = re.sub(r"^!\[.*\n?", "", page.read_text(encoding="utf-8").strip(), flags=re.MULTILINE)
    below = re.sub(r"^#+ ", lambda marks: f"##{marks[0]}", text, flags=re.MULTILINE).strip()
    return f"## Verdict\n\n{below}\n\n"


def further_limits(recipe: Recipe | None, sources: Mapping[str, Any]) -> str:
    lines = []
    if unstated := [name for name, source in sources.items() if not source.get("licence")]:
        lines.append(
            f"- The licence is not stated of: {', '.join(unstated)} (`data.sources[].licence` in the recipe).\n"
        )
    if recipe is not None and recipe.model.path is not None and not recipe.model.from_scratch:
        lines.append("- Licence and limits of the base model hold for this one too.\n")
    return "".join(lines)


def read_judgements(metrics: Path, step: int | None = None) -> list[Judgement]:
    """The first evaluation of a run, and the last one or that of a step."""
    found: dict[str, dict[int, float]] = {}
    for logged in read_objects(metrics, []):
        for key, value in logged.items():
            if match := FIGURE.fullmatch(key):
                found.setdefault(match[1], {})[logged["step"]] = value
    judgements = []
    for name, values in found.items():
        at = max(values) if step is None else step
        if at in values:
            judgements.append(Judgement(name, values.get(0) if at else None, values[at]))
    return judgements
