"""`python -m docs.make_reference`: docs/reference, from the recipe's JSON schema, built-ins and commands' help."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer import Context
from typer.cli import get_docs_for_click

from cpt.checkpoints.retention import RULES
from cpt.cli import GROUPS, load_command
from cpt.data.readers.filters import BUILT_IN
from cpt.evaluation.tasks import DOMAIN_TEST, domain_test_of_recipe, task_of_recipe
from cpt.optim.build import BUILDERS
from cpt.optim.schedules import SCHEDULES
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, columns_of_stage
from cpt.recipe.load import CLASSES_IN_TRAINING, class_of_change
from cpt.recipe.schema import Recipe
from cpt.stages.rewards import REWARDS
from cpt.training.callbacks import CALLBACKS
from cpt.training.loss_guard import LOSS_GUARDS

FOLDER = Path(__file__).parent / "reference"
BUILT_INS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "data.transforms": BUILT_IN["transform"],
    "data.filters": BUILT_IN["filter"],
    "optimizer.name": BUILDERS,
    "schedule.name": SCHEDULES,
    "checkpoints.keep": RULES,
    "monitoring.callbacks": CALLBACKS,
    "safety.loss_guard": LOSS_GUARDS,
    "evaluation.tasks": {"hellaswag": task_of_recipe, DOMAIN_TEST: domain_test_of_recipe},
    "rewards": REWARDS,
}
"""Key of the recipe -> what it takes by name."""
TRANSFORMERS = (
    "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
)
CHANGES_IN_TRAINING = ""
for change_class, patterns in CLASSES_IN_TRAINING.items():
    keys = ", ".join(f"`{pattern}`" for pattern in patterns.split())
    CHANGES_IN_TRAINING += f"Change `{change_class}`: {keys}. "
NOTES = {
    "optimizer.name": """Every optimizer also takes `embedding_learning_rate` (of embeddings and head)
and `release_gradients` (update each parameter in the backward pass and free its gradient).""",
    "safety.loss_guard": """Every guard also takes `window` (accepted steps to compare with; 128), `skips` (more
skipped steps than this in the window: back to the last checkpoint, without their rows; 4) and `rollbacks` (how
often; then the run stops; 3).""",
    "training": f"""The manuals of [transformers]({TRANSFORMERS}) and [TRL](https://huggingface.co/docs/trl) describe
the keys. `cpt/recipe/training_keys.py` lists all of them: a key is passed on, or our code has its effect, or
`cpt check` refuses it, with the recipe's own key or the reason why it would have no effect.

{CHANGES_IN_TRAINING}
All other keys: change `from_step`.""",
}
SIGNS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "ge": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
}
RECIPE = """# Recipe reference

<!-- Written by `python -m docs.make_reference` from cpt/recipe/schema.py and the built-ins: change those. -->

This page lists every key of a recipe with its type, its default and its meaning. The
[README](../../README.md#a-recipe) shows a whole recipe, and [the tutorials](../tutorials/first_run.md) explain one.

- A whole number may be written `1_000_000` or `1e6`. Numbers of tokens take k, M, B and T (`20M`), sizes take kB to
  TB and KiB to TiB.
- A section may be the path of a YAML file, or have a `base:` that names one, and keys that change it.
- Where a key takes a name, `package.module:function` uses your own function ([extending
  cpt](../howto/extending.md)). Options follow the name: `{name: length, min_characters: 200}`.
- On the command line each key is `section.key=value`: `cpt train RECIPE optimizer.learning_rate=2e-5
  data.sources.0.weight=0.5`; `data.sources[0].weight` is the same key.
- `change` says whether a run that has started accepts a new value. `free`: yes, what is learned does not change.
  `from_step`: yes, with `--change`, from the run's last checkpoint on. `fixed`: no, start a run with another `name`
  ([changing a run](../howto/resuming.md#change-a-run)).
- `cpt schema > recipe.schema.json` gives the schema to an editor; `cpt check RECIPE` finds every mistake.
"""
COMMANDS = """# Command reference

<!-- Written by `python -m docs.make_reference` from the commands' own help; change that, not this page. -->

This page shows what `cpt COMMAND --help` prints. `key.path=value` after a recipe changes any key of the
[recipe](recipe.md). [Errors](errors.md#exit-codes) lists the exit codes.
"""


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


def pages() -> dict[str, str]:
    schema = Recipe.model_json_schema(by_alias=True)
    return {
        "recipe.md": "\n\n".join([RECIPE.strip(), *keys_below(schema, schema["$defs"], "")]) + "\n",
        "commands.md": "\n\n".join([COMMANDS.strip(), *commands()]) + "\n",
    }


def keys_below(section: dict[str, Any], sections: dict[str, Any], prefix: str) -> Iterator[str]:
    """Each key of a section, then the keys of the sections in it."""
    inside = []
    for key, node in section["properties"].items():
        name, nested, is_list = prefix + key, *section_in(node, sections)
        default = f"default `{json.dumps(node.get('default'))}`" if is_list or not nested else ""
        default = "required" if key in section.get("required", ()) else default
        about = ", ".join(filter(None, [kind(node), default, f"change `{class_of_change(name)}`"]))
        meaning = in_one_line(node.get("description") or (nested or {}).get("description", ""))
        yield f"{'###' if prefix else '##'} `{name}`\n\n{about}. {meaning}"
        if name in BUILT_INS:
            yield "\n".join(
                line
                for builtin, called in BUILT_INS[name].items()
                for line in built_in(builtin, called)
            )
        if name in NOTES:
            yield NOTES[name]
        if name == "stage":
            rows = [
                "| [stage](training.md) | columns of an example | `training:` goes to |",
                "| --- | --- | --- |",
            ]
            for stage, config in STAGE_CONFIGS.items():
                rows.append(
                    f"| `{stage}` | {', '.join(f'`{one}`' for one in columns_of_stage(stage))} | `{config}` |"
                )
            yield "\n".join(rows)
        if nested and (nested.get("additionalProperties") is not True or not prefix):
            below = nested, sections, f"{name}{'[]' if is_list else ''}."
            if prefix:
                inside.append(below)
            else:
                yield from keys_below(*below)
    for below in inside:
        yield from keys_below(*below)


def section_in(
    node: dict[str, Any], sections: dict[str, Any]
) -> tuple[dict[str, Any] | None, bool]:
    """The section that a key holds, and whether it holds a list of them."""
    for part in node.get("anyOf", [node]):
        item = part.get("items", part)
        if "$ref" in item:
            return sections[item["$ref"].rpartition("/")[2]], item is not part
    return None, False


def kind(node: dict[str, Any]) -> str:
    """`integer > 0 (tokens) or null`."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(kind(part) for part in node["anyOf"]))
    if "enum" in node or "const" in node:
        return " or ".join(
            f"`{json.dumps(value)}`" for value in node.get("enum", [node.get("const")])
        )
    if "items" in node:
        return f"list of {kind(node['items'])}"
    found = [key for key in SIGNS if key in node and node[key] < 10**6]
    lower = [key for key in found if SIGNS[key].startswith(">")]
    highest = max(lower, key=lambda key: (node[key], SIGNS[key] == ">"), default=None)
    bounds = "".join(
        f" {SIGNS[key]} {node[key]:,}" for key in found if key == highest or key not in lower
    )
    unit = f" ({node['unit']})" if "unit" in node else ""
    return f"{node.get('type', 'section' if '$ref' in node else 'any value')}{bounds}{unit}"


def built_in(name: str, called: Callable[..., Any]) -> Iterator[str]:
    """A built-in as an item of a list, its options below it."""
    text = inspect.getdoc(called) or ""
    summary = in_one_line(
        re.split(r"^(?:Args|Returns|Raises):$", text, maxsplit=1, flags=re.MULTILINE)[0]
    )
    yield f"- `{name}`: {summary}"
    meanings = {
        argument: in_one_line(meaning)
        for names, meaning in re.findall(
            r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", text, re.MULTILINE
        )
        for argument in names.split(", ")
    }
    function = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    for option in inspect.signature(function).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            default = (
                "required" if option.default is option.empty else f"default `{option.default!r}`"
            )
            form = inspect.formatannotation(option.annotation, "collections.abc").replace("|", "or")
            yield f"  - `{option.name}`: {form}, {default}. {meanings.get(option.name, '')}".rstrip()


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def commands() -> Iterator[str]:
    """Every command under its group, as typer documents it."""
    for group, names in GROUPS.items():
        yield f"## {group}"
        for name in names:
            command = load_command(name)
            page = get_docs_for_click(
                obj=command, ctx=Context(command), indent=2, name=name, call_prefix="cpt"
            )
            yield re.sub(r"^\* `--help`.*\n", "", page, flags=re.MULTILINE).strip()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
