"""docs/reference/recipe.md: every key of a recipe with its type, default and meaning, and the names that it takes."""

import re
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cpt.errors import CptError
from cpt.recipe.automatic import AUTOMATIC
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES, new_home
from cpt.recipe.peft_methods import LORA, OTHERS, UNFIT
from cpt.recipe.schema import HeldOut, Recipe
from cpt.recipe.schema_data import DocumentSource
from cpt.recipe.section import Component
from cpt.recipe.sections import item_in, keys_of, section_in
from cpt.recipe.stage_columns import columns_of_stage
from cpt.reference.built_ins import BuiltIn, Option, built_ins, options_of_all
from cpt.reference.docstrings import on_one_line, summary_of
from cpt.reference.types_in_words import default_in_words, type_in_words
from cpt.shipped import SHIPPED_FILES

RECIPES = SHIPPED_FILES / "recipes"
EXAMPLES = {
    "model": "minimind/pretrain.yaml",
    "tokenizer": "gpt2_124m.yaml",
    "monitoring": "experiments/active/exp001_llama7b_pretrain.yaml",
    "data": "demo.yaml",
    "budget": "cpt_chemistry.yaml",
    "optimizer": "cpt_chemistry.yaml",
    "schedule": "cpt_chemistry.yaml",
    "checkpoints": "cpt_chemistry.yaml",
    "evaluation": "demo.yaml",
    "rewards": "tiny/grpo.yaml",
    "training": "cpt_chemistry.yaml",
}
"""Section -> the recipe that shows it."""

TRANSFORMERS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
TRL = "https://huggingface.co/docs/trl"

BEGIN = """# Recipe reference

<!-- Written by `python -m cpt.reference` from cpt/recipe/schema.py and the built-ins; change those, not this page. -->

Every key that a recipe may have. [The recipe, line by line](../recipe.md) explains one that is whole, and
[recipes/README.md](../../recipes/README.md) lists those that ship.

- Below each key stand its type, whether it is needed or what it is by default, and what it means. An unknown key is an error with the
  nearest known one.
- A whole number may be written `1_000_000` or `1e6`. Numbers of tokens take k, M, B and T (powers of ten: `20M`, `1.5B`), sizes take
  kB to TB and KiB to TiB (`20GB`, `16GiB`). Lengths of rows take no unit, since 4K can mean 4000 or 4096.
- A section may be the path of a YAML file instead, or have a `base:` that names one and keys of its own on top.
- Where a key takes a name, `package.module:function` takes a function of yours ([your own parts](../guides/your_own_parts.md)). Options
  stand beside the name and are checked against the function's signature before anything is loaded: `{name: length, min_characters: 200}`.
- On the command line each key is `section.key=value`: `cpt train RECIPE optimizer.learning_rate=2e-5 data.sources.0.weight=0.5`.
- `cpt schema > recipe.schema.json` gives all of this to an editor; `cpt check RECIPE` finds every mistake.
"""  # noqa: E501


def recipe_page() -> str:
    """The page.

    Raises:
        CptError: a key has no description.
    """
    top = keys_of(Recipe)
    own = {
        name: field
        for name, field in top.items()
        if not section_in(field.annotation) and name not in ("rewards", "training")
    }
    parts = [BEGIN, "## The top of a recipe\n"]
    parts += [key_of(name, field) for name, field in own.items()]
    for name, field in top.items():
        if name not in own and name != "training":
            parts += section(name, field)
    return "\n".join([*parts, training(top["training"])])


def section(name: str, field: FieldInfo) -> Iterator[str]:
    """A section of the recipe with all its keys, those of its lists' items behind them."""
    inside, item = section_in(field.annotation), section_in(item_in(field.annotation))
    yield f"## `{name}`\n"
    if inside is not None:
        yield f"{summary_of(inside)} {'Needed.' if field.is_required() else ''}".strip() + "\n"
        yield from example(name)
        yield from keys_below(name, inside)
    elif item is not None:
        yield on_one_line(description_of(name, field)) + "\n"
        yield from example(name)
        yield from names(name)
        yield from keys_below(f"{name}[]", item)


def keys_below(name: str, inside: type[BaseModel]) -> Iterator[str]:
    """Each key, then those of the sections in it and in its lists."""
    for key, field in keys_of(inside).items():
        yield key_of(f"{name}.{key}", field)
    for key, field in keys_of(inside).items():
        item = section_in(item_in(field.annotation))
        if item is HeldOut:
            yield held_out_sets(f"{name}.{key}")
        elif item is not None and not issubclass(item, Component):
            yield from keys_below(f"{name}.{key}[]", item)
        elif (nested := section_in(field.annotation)) is not None and not issubclass(nested, Component):
            yield from keys_below(f"{name}.{key}", nested)


def held_out_sets(name: str) -> str:
    """Their keys are a source's, which have their headings already."""
    keys = ", ".join(f"[`{key}`](#datasources{key})" for key in keys_of(DocumentSource))
    return (
        f"A set of [`{name}`](#{name.replace('.', '')}) has the keys of a source that say where documents come from:"
        f" {keys}.\n"
    )


def key_of(key: str, field: FieldInfo) -> str:
    """One key under a heading of its own."""
    default = "needed" if field.is_required() else default_in_words(field.get_default(call_default_factory=True))
    kind = type_in_words(field.annotation, field.metadata)
    lines = [
        f"### `{key}`\n",
        f"{kind[0].upper()}{kind[1:]}; {default}.\n",
        on_one_line(description_of(key, field)) + "\n",
    ]
    return "\n".join([*lines, *names(key)])


def description_of(key: str, field: FieldInfo) -> str:
    """What the schema says of the key.

    Raises:
        CptError: nothing.
    """
    if not field.description:
        raise CptError(
            f"`{key}` has no description. Write a docstring under it in cpt/recipe/schema.py or schema_data.py."
        )
    return field.description


def names(key: str) -> Iterator[str]:
    """The built-ins that a key takes by name, with their options."""
    found = built_ins(key)
    if found:
        yield "\n".join(["Built in:\n", *(told(one) for one in found), ""])
    if shared := options_of_all(key):
        yield "\n".join(
            ["Every one of them, and your own, also takes:\n", *(line_of(option, "") for option in shared), ""]
        )
    if re.fullmatch(r"data\.sources\[\]\.(transforms|filters)", key):
        kind = key.rpartition(".")[2]
        yield f"Built in: those of [`data.{kind}`](#data{kind}).\n"
    if key == "model.lora":
        yield lora_methods()
    if key == "stage":
        yield stages()


def told(one: BuiltIn) -> str:
    """One built-in as an item of a list, its options below it."""
    meaning = one.meaning.replace("\n\n", " ")
    return "\n".join([f"- `{one.name}`: {meaning}", *(line_of(option, "  ") for option in one.options)])


def line_of(option: Option, indent: str) -> str:
    """`- `floor`: number, default `0.1`. The last learning rate as a share of the peak."""
    meaning = f" {option.meaning[0].upper()}{option.meaning[1:]}" if option.meaning else ""
    return f"{indent}- `{option.name}`: {option.kind}; {option.default}.{meaning}"


def example(name: str) -> Iterator[str]:
    """The section as a recipe that ships has it."""
    if name in EXAMPLES:
        path = EXAMPLES[name]
        yield (
            f"In [{path}](../../recipes/{path}):\n\n```yaml\n{section_text((RECIPES / path).read_text(), name)}\n```\n"
        )


def section_text(text: str, name: str) -> str:
    """The lines of a top-level section, comments included."""
    found = re.search(rf"^{name}:.*(?:\n(?:[ -].*|(?=\n[ -])))*", text, re.MULTILINE)
    if found is None:
        raise CptError(f"no section `{name}` in the example of it")
    return found[0].rstrip()


def stages() -> str:
    """What `stage` may be."""
    rows = [
        f"| `{stage}` | {', '.join(f'`{column}`' for column in columns_of_stage(stage))} |"
        f" `{config.replace(':', '.')}` |"
        for stage, config in STAGE_CONFIGS.items()
    ]
    head = ["| stage | columns of an example | `training:` goes to |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, "\n[The stages](../stages.md) have a page of their own.\n"])


def lora_methods() -> str:
    """Adapters other than LoRA."""
    reasons: dict[str, list[str]] = {}
    for method, why in UNFIT.items():
        reasons.setdefault(why, []).append(f"`{method}`")
    refused = [f"- {', '.join(methods)}: {why}." for why, methods in reasons.items()]
    taken = (
        f"Methods that were tried here: {LORA}, {OTHERS}. Any other that the installed peft registers is taken too,"
        " except:\n"
    )
    return "\n".join([taken, *refused, ""])


def training(field: FieldInfo) -> str:
    """What Hugging Face's keys are for, and which of them are written elsewhere."""
    automatic = ", ".join(f"`{key}`" for key in AUTOMATIC)
    lines = [
        "## `training`\n",
        on_one_line(description_of("training", field)) + "\n",
        f"They are described in the manuals of [transformers]({TRANSFORMERS}) and [TRL]({TRL}).\n",
        *example("training"),
        (
            f"`auto` lets the plan choose, for the machine that the run is on: {automatic}"
            " ([planning](../planning.md)).\n"
        ),
        "### Keys that are written elsewhere\n",
        "What cpt has a key for is an error under `training`, which names that key.\n",
        "| under `training` elsewhere | here |",
        "| --- | --- |",
        *(f"| `{key}` | {new_home(key)} |" for key in MOVED),
        "\n### Keys that would do nothing\n",
        "They are refused, with the reason.\n",
        "| key | why |",
        "| --- | --- |",
        *(f"| `{key}` | {why} |" for key, why in NO_EFFECT.items()),
        "\nOf TRL's configs also:\n",
        "| key | why |",
        "| --- | --- |",
        *(f"| `{key}` | {why} |" for key, why in NO_EFFECT_ON_EXAMPLES.items()),
    ]
    return "\n".join(lines) + "\n"
