"""The README.md of an export: data with their licences, recipe, base, figures, limits, how to serve; with the Hub's
YAML header."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from cpt.files import write_atomic
from cpt.recipe.huggingface_keys import LORA, method_of
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_local
from cpt.recipe.schema import Recipe
from cpt.runs.folder import ENVIRONMENT, EXPORT, INPUTS, METRICS, RECIPE, VERDICT_PAGE, read_object, read_objects

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FIGURE = re.compile(r"eval_(.+)_bits_per_byte")
LICENCE_NOT_KNOWN = "not stated"


@dataclass(frozen=True)
class Judgement:
    """Bits per byte on one held-out set."""

    name: str
    before: float | None
    after: float


def write_model_card(
    folder: Path, run: Path | None, name: str, *, step: int | None = None, adapter: bool = False
) -> None:
    """Write README.md into an exported folder.

    Args:
        run: the folder of the run that trained it, for the data, the recipe and the figures; None: of a model from
            elsewhere.
        name: how the model is called.
        step: of the run's checkpoint that it is; None: its end.
        adapter: the folder holds an adapter instead of a model.
    """
    recipe = None if run is None else load_recipe(run / RECIPE)
    record = {} if run is None else read_json(run / INPUTS)
    judgements = [] if run is None else read_judgements(run / METRICS, step)
    header = card_data(name, recipe, judgements, adapter)
    parts = [
        f"# {name}",
        introduction(recipe, adapter),
        data_part(record),
        recipe_part(run, recipe, step),
        figures_part(judgements, step),
        verdict_part(run, step),
        limits_part(recipe, record),
        serving_part(name if folder.name.startswith(".") or folder.name == EXPORT else folder.name, adapter),
    ]
    card = ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n")
    write_atomic(folder / "README.md", str(card), reuse_space=True)


def card_data(name: str, recipe: Recipe | None, judgements: list[Judgement], adapter: bool) -> ModelCardData:
    """The header that the Hub reads: only what is certain stands in it."""
    base = None if recipe is None else recipe.model.path
    sources = [] if recipe is None else [source.path for source in recipe.data.sources]
    licence = base_licence(base)
    return ModelCardData(
        model_name=name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if base is not None and HUB_ID.fullmatch(base) and not Path(base).exists() else None,
        datasets=sorted({path for path in sources if HUB_ID.fullmatch(path) and not Path(path).exists()}) or None,
        license=licence,
        tags=(
            ["cpt", "continued-pretraining" if recipe is not None and base is not None else "pretraining"]
            if recipe
            else ["cpt"]
        ),
        eval_results=[
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
        or None,
    )


def base_licence(base: str | None) -> str | None:
    """What the base model's own card says, where one lies beside its weights; it binds what is made from them."""
    if base is None or not is_local(base):
        return None
    card = Path(base).expanduser() / "README.md"
    if not card.is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (ValueError, yaml.YAMLError):  # a card by hand, whose header is none
        return None
    return licence if isinstance(licence, str) else None


def introduction(recipe: Recipe | None, adapter: bool) -> str:
    """What it is and where it comes from."""
    if recipe is None:
        return "Exported by cpt from weights that no run of cpt's trained; nothing is known here of their data."
    what = "A LoRA adapter" if adapter else "A causal language model"
    base = recipe.model.path
    came = (
        f"continued from `{base}`"
        if base is not None and not recipe.model.from_scratch
        else "trained from new weights"
    )
    licence = base_licence(base)
    told = (
        ""
        if base is None
        else f" Licence of the base: {licence or LICENCE_NOT_KNOWN + ' here; read its card before you share this'}."
    )
    return f"{what}, {came} by the run `{recipe.name}` (stage `{recipe.stage}`). {recipe.description}{told}".rstrip()


def data_part(record: dict[str, Any]) -> str:
    """Each source with its licence."""
    sources = record.get("data", {}).get("sources", {})
    if not sources:
        return "## Data\n\nNot recorded."
    rows = [
        f"| {name} | {one.get('licence') or LICENCE_NOT_KNOWN} | {one['share']:.1%} | {one['documents']:,} |"
        f" {one['tokens']:,} |"
        for name, one in sources.items()
    ]
    table = "\n".join(
        [
            "| source | licence | share of the training tokens | documents | tokens |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    )
    return f"## Data\n\n{table}\n\nFingerprint of the data: `{record['data']['fingerprint']}`."


def recipe_part(run: Path | None, recipe: Recipe | None, step: int | None) -> str:
    """The settings that decide most, and the whole recipe."""
    if recipe is None or run is None:
        return ""
    environment = read_json(run / ENVIRONMENT)
    versions = ", ".join(f"{name} {number}" for name, number in environment.get("versions", {}).items() if number)
    commit = (environment.get("git") or {}).get("commit")
    made = f"Made with {versions}" + (f"; commit `{commit}`." if commit else ".")
    method = (
        "all parameters"
        if recipe.model.lora is None
        else f"{name_of_method(recipe.model.lora)} {recipe.model.lora or '(our defaults)'}"
    )
    lines = [
        f"- trained: {method}; sequence length {recipe.data.sequence_length:,}",
        f"- optimizer: {recipe.optimizer.name}, learning rate {recipe.optimizer.learning_rate:g}"
        f" {recipe.optimizer.options or ''}".rstrip(),
        f"- schedule: {recipe.schedule.name} {recipe.schedule.options or ''}".rstrip(),
        f"- budget: {budget_of(recipe)}; seed {recipe.seed}",
    ]
    if step is not None:
        lines.append(f"- taken at step {step:,}, before or at the end of that budget")
    written = yaml.safe_dump(
        recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True), sort_keys=False, allow_unicode=True
    )
    details = (
        f"<details><summary>The recipe, defaults left out</summary>\n\n```yaml\n{written.strip()}\n```\n\n</details>"
    )
    return "## Recipe\n\n" + "\n".join(lines) + f"\n\n{made}\n\n{details}"


def budget_of(recipe: Recipe) -> str:
    """In the recipe's own terms."""
    budget = recipe.budget
    length = f"{budget.tokens:,} tokens" if budget.tokens else f"{budget.epochs:g} times the sources"
    return length + (f" in steps of {budget.global_batch_tokens:,}" if budget.global_batch_tokens else "")


def figures_part(judgements: list[Judgement], step: int | None) -> str:
    """Bits per byte before and after."""
    if not judgements:
        return "## Evaluation\n\nNot evaluated" + ("." if step is None else f" at step {step:,}.")
    rows = [
        f"| {one.name} | {'-' if one.before is None else f'{one.before:.4f}'} | {one.after:.4f} |"
        for one in judgements
    ]
    return "\n".join(
        [
            "## Evaluation",
            "",
            (
                "Bits per byte on held-out documents (lower is better; comparable between tokenizers), measured in the"
                " run:"
            ),
            "",
            "| held-out set | before | after |",
            "| --- | --- | --- |",
            *rows,
        ]
    )


def verdict_part(run: Path | None, step: int | None) -> str:
    """The run's own verdict of its end, where it gave one."""
    page = None if run is None or step is not None else run / VERDICT_PAGE
    if page is None or not page.is_file():
        return ""
    text = re.sub(
        r"^!\[.*\n?", "", page.read_text(encoding="utf-8").strip(), flags=re.MULTILINE
    )  # its pictures stay in the run's folder
    below = re.sub(r"^#+ ", lambda marks: f"##{marks[0]}", text, flags=re.MULTILINE).strip()
    return f"## Verdict\n\n{below}"


def limits_part(recipe: Recipe | None, record: dict[str, Any]) -> str:
    """What nobody should take for granted."""
    lines = [
        "- It continues text. It was not taught to refuse, to be truthful or to follow instructions by this run.",
        (
            "- It repeats what its data say, errors and personal data included; the figures above are of the named"
            " held-out sets only."
        ),
    ]
    unstated = [
        name for name, source in record.get("data", {}).get("sources", {}).items() if not source.get("licence")
    ]
    if unstated:
        lines.append(
            f"- Nobody stated the licence of: {', '.join(unstated)} (`data.sources[].licence` in the recipe)."
        )
    if recipe is not None and recipe.model.path is not None and not recipe.model.from_scratch:
        lines.append("- Licence and limits of the base model hold for this one too.")
    return "## Limits\n\n" + "\n".join(lines)


def serving_part(name: str, adapter: bool) -> str:
    """The commands."""
    if adapter:
        return (
            "## Use\n\n```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")\n```\n\n'
            "It needs the base model that `adapter_config.json` names; `base_weights.json` holds the sha256 of its"
            " files. "
            "One model of both: `cpt merge --method lora BASE ADAPTER --output FOLDER`."
        )
    return (
        f"## Serve\n\n```bash\ncpt serve {name}            # or: transformers serve {name}, vllm serve {name}\n"
        "curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 64}}\'\n```'
    )


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


def read_json(path: Path) -> dict[str, Any]:
    """A file of the run's record; empty where it was not written, or is damaged."""
    return read_object(path, [])


def name_of_method(lora: Mapping[str, Any]) -> str:
    """What readers call it."""
    return "LoRA" if method_of(lora) == LORA else f"peft's {method_of(lora)}"
