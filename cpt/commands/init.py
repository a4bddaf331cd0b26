"""`cpt init DOCUMENTS --model MODEL --gpu GPU`: write a commented recipe, or say why that is impossible."""

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from jinja2 import Environment

from cpt.command_line import Force, Gpu, refuse_ignored
from cpt.data.readers.account import format_account
from cpt.data.readers.filters import without_lines
from cpt.data.readers.shared_lines import LEAST_OF_TEXT, TRANSFORM, SharedLines
from cpt.data.readers.sources import files_of, kind_of, listing_once
from cpt.data.rows.open_sources import compare_sample
from cpt.data.store.tokenization import DocumentEncoder
from cpt.distributed import print_once
from cpt.errors import RecipeError, install_line
from cpt.evaluation.paired import FEW
from cpt.formatting import format_duration
from cpt.hardware import find_gpus
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.recipe.values import in_yaml
from cpt.runs.record import EXPORT

if TYPE_CHECKING:
    from cpt.planning.init_recipe import BaseModel, DocumentStatistics, RecipeChoices
    from cpt.planning.speed import Target

NO_REPLAY = "none"
SELF = "self"
PUBLIC_GENERAL = "HuggingFaceFW/fineweb-edu"
TOKENS_OF_A_PAGE = 800  # fineweb-edu has about 1,000; fewer, to get enough pages
WIDTH = 118
WORDS_OF_YAML = {"null", "true", "false", "yes", "no", "on", "off"}
TEMPLATE = Path(__file__).with_name("recipe.yaml.jinja")
FIRST_WORDS = re.compile(r"(\S+\s+){7}\S+")  # including line breaks and indentation of code


@listing_once()
def command(
    documents: Annotated[
        str, typer.Argument(help="File, folder or glob: txt, md, jsonl, parquet, csv, ...")
    ],
    model: Annotated[str, typer.Option(help="Folder or Hub id of the base model.")],
    gpu: Gpu = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="The recipe's file.")] = Path("recipe.yaml"),
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Adds the cost, in any currency.")
    ] = None,
    general: Annotated[
        str | None, typer.Option(help="Text to replay: a path, a Hub dataset, self or none.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column or JSON key of the text.")] = None,
    tokens: Annotated[int | None, typer.Option(help="The budget in tokens.", min=1)] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="GiB of host memory, for offloading.")
    ] = None,
    full: Annotated[
        bool | None, typer.Option("--full/--lora", help="Train all parameters, or adapters.")
    ] = None,
    shift: Annotated[
        Literal["weak", "strong"] | None,
        typer.Option(help="How far the text is from the base's data."),
    ] = None,
    force: Force = False,
) -> None:
    """Write a recipe for these documents, this model and this machine.

    Example: cpt init papers/ --model Qwen/Qwen2.5-1.5B --gpu "RTX 4090" --price-per-gpu-hour 0.4
    """
    if output.exists() and not force:
        raise RecipeError(
            f"{output} exists. Choose another name with --output, or overwrite it with --force."
        )

    # Imported after the output is checked: they import torch, which takes seconds.
    from cpt.planning.init_recipe import TOKENISED, choose, read_base, read_documents
    from cpt.planning.speed import find_target

    if not gpu:
        gpus_here = find_gpus()
        gpu = gpus_here[0].name if gpus_here else "cpu"
    target = find_target(gpu, gpus, host_memory)
    refuse_ignored({"--gpus": gpus > 1 and target.on_cpu}, "with --gpu cpu")
    if general not in (None, NO_REPLAY, SELF) and kind_of(str(general)) == "local":
        files_of(DocumentSource(path=str(general)), "--general")  # DataError without files
    base = read_base(model)
    encoder = DocumentEncoder(base.tokenizer)
    facts = read_documents(documents, text_column, encoder)
    choices = choose(
        facts,
        base,
        target,
        with_replay=general != NO_REPLAY,
        tokens=tokens,
        full=full,
        shift=shift,
    )
    if facts.is_whole and facts.documents <= TOKENISED:
        count = f"{facts.tokens:,} with the base's tokenizer."
    else:
        count = f"about {facts.tokens:,} with the base's tokenizer, estimated from {TOKENISED} documents."
    estimates = {
        "documents": format_documents(facts),
        "tokens": count,
        "cost": format_cost(choices, target, price_per_gpu_hour),
    }
    shared = SharedLines()
    for text in facts.sample:
        shared.add(text)
    content = recipe_text(
        facts, base, target, choices, estimates, shared, output=output, general=general
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(content, encoding="utf-8")
    recipe = load_recipe(output)  # shape and rules; `cpt check` checks the rest
    for name, estimate in estimates.items():
        print_once(f"{name.capitalize()}: {estimate}")
    report_domain(recipe, encoder)
    if shared.share_of_text(shared.found()) >= LEAST_OF_TEXT:
        summary = shared.summary(shared.found())
        print_once(f"warning: {summary}. The transform in a comment of {output} drops them.")
    if general == SELF:
        print_once(
            f"First let the base write the text to replay: {command_for_replay(base, choices)}"
        )
    print_once(f"Wrote {output}; its comments give the reasons. Next: cpt check {output}")


def format_documents(facts: "DocumentStatistics") -> str:
    number = f"{facts.documents:,}" if facts.is_whole else f"about {facts.documents:,}"
    formats = ", ".join(f"{count:,} {name}" for name, count in facts.formats.most_common())
    languages = f"languages unknown ({install_line('language')})"
    if facts.languages is not None:
        num_documents = facts.languages.total()
        shares = []
        for code, count in facts.languages.most_common(3):
            shares.append(f"{code} {100 * count / num_documents:.0f} %")
        languages = f"languages {', '.join(shares)} (py3langid)"
    bad_rows = f"{facts.bad_rows:,} bad rows"
    if facts.bad_rows:
        bad_rows += f" (the first: {facts.first_bad})"
    return (
        f"{number} in {formats} files, {facts.text_bytes / 1e6:,.3g} MB of text; {languages};"
        f" {bad_rows}; {share_of_repeats(facts)} duplicates."
    )


def share_of_repeats(facts: "DocumentStatistics") -> str:
    return f"{100 * facts.repeats / facts.documents_read:.1f} %"


def format_cost(choices: "RecipeChoices", target: "Target", price: float | None) -> str:
    expected, shortest, longest = (format_duration(3600 * hours) for hours in choices.way.hours)
    money = ""
    if price is not None and target.gpus:
        money = f"; {choices.way.hours[0] * target.gpus * price:,.2f} at {price:g} per GPU hour"
    span = f"about {expected} ({shortest} to {longest}; estimated, without evaluation and saving)"
    return f"{span}{money}."


def recipe_text(
    facts: "DocumentStatistics",
    base: "BaseModel",
    target: "Target",
    choices: "RecipeChoices",
    estimates: dict[str, str],
    shared: SharedLines,
    *,
    output: Path,
    general: str | None,
) -> str:
    """Return the recipe with a reason above each choice; `general` is the replayed text, None: the public set."""
    from cpt.planning.init_recipe import (
        ADAPTERS_ONLY,
        BITS_OF_PARAMETER,
        FEW_TOKENS,
        TOO_FEW_FOR_FACTS,
    )

    way = choices.way
    shared_lines = shared.found()
    why_adapters = "as requested"
    for reason in way.refused:
        if reason.startswith("all"):
            why_adapters = f"since {reason} by plan"  # the last of them
    variables = {
        "facts": facts,
        "base": base,
        "target": target,
        "choices": choices,
        "output": output,
        **estimates,
        "source": facts.source,
        "way": way,
        "name": name_of_run(base, facts.source),
        "general": general,
        "to_generate": None,
        "why_adapters": why_adapters,
        "adapters": json.dumps(ADAPTERS_ONLY),
        "is_small": facts.tokens < FEW_TOKENS,
        "lacks_wordings": facts.tokens < TOO_FEW_FOR_FACTS,
        "lacks_rank": way.name != "full" and facts.tokens > BITS_OF_PARAMETER * way.trained,
        "repeated": share_of_repeats(facts),
        "max_bad_share": max(0.001, round(1.5 * facts.bad_share, 4)),
        "public_general": PUBLIC_GENERAL,
        "shared": shared.summary(shared_lines) if shared_lines else None,
        "shared_transform": json.dumps(
            {"name": TRANSFORM, "lines": list(shared_lines)}, ensure_ascii=False
        ),
        "pages": round(1.2 * choices.replay * choices.tokens / TOKENS_OF_A_PAGE) + 1000,
        "prompts": [
            json.dumps(prompt, ensure_ascii=False)
            for prompt in prompts_from(facts.sample, shared_lines)
        ],
    }
    if general == SELF:
        variables["general"] = "self_replay"
        variables["to_generate"] = command_for_replay(base, choices)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["yaml"] = plain
    environment.filters["rate"] = lambda rate: in_yaml(float(f"{rate:.2e}"))
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return "".join(map(wrapped, template.render(variables).splitlines(keepends=True)))


def name_of_run(base: "BaseModel", source: DocumentSource) -> str:
    """Such as `Qwen2.5-1.5B-papers`, of the characters that a run's name may have."""
    folder = Path(base.path)
    if folder.name == EXPORT:
        folder = folder.parent
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.name}-{Path(source.path).stem}")
    return name.strip("-._") or "cpt"


def prompts_from(sample: Sequence[str], shared_lines: dict[str, int]) -> list[str]:
    """The beginnings of two documents of usual length; two that begin alike give one prompt."""
    texts = [without_lines(text, shared_lines).strip() for text in sample]
    texts = sorted((text for text in texts if len(text.split()) > 20), key=len)
    beginnings: list[str] = []
    for text in texts[len(texts) // 2 :]:
        first_words = FIRST_WORDS.match(text)
        if first_words is not None and first_words[0] not in beginnings:
            beginnings.append(first_words[0])
    return beginnings[:2] or ["The"]


def command_for_replay(base: "BaseModel", choices: "RecipeChoices") -> str:
    """The command that writes the replayed text of `--general self`, with what will be held out of it."""
    tokens = round(1.1 * choices.replay * choices.tokens / (1 - choices.held_out_share))
    return (
        f"cpt data generate-replay {shlex.quote(base.path)} --tokens {tokens} --output self_replay"
    )


def wrapped(line: str) -> str:
    """Wrap a long comment; return any other line unchanged."""
    lead = line[: len(line) - len(line.lstrip())] + "# "
    if len(line) <= WIDTH or not line.startswith(lead):
        return line
    wrapper = textwrap.TextWrapper(
        WIDTH, lead, lead, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(line.strip()[2:]) + "\n"


def plain(text: str) -> str:
    """Return the text as a YAML value, quoted only if necessary."""
    is_word = re.fullmatch(r"(\.{0,2}/|~/)?[A-Za-z_][A-Za-z0-9_./-]*", text) is not None
    if is_word and text.lower() not in WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False)


def report_domain(recipe: Recipe, encoder: DocumentEncoder) -> None:
    """Print the account of the documents, and warnings about their sizes and what the tokenizer does not give back."""
    from cpt.data.rows.held_out import check_sizes  # torch

    first_source = recipe.data.sources[0]
    without_replay = recipe.data.model_copy(update={"sources": [first_source]})
    accounts, warnings = check_sizes(without_replay, recipe.evaluation, few=FEW)
    for account in accounts:
        print_once(format_account(account))
    try:
        warnings += compare_sample(without_replay, first_source, "data.sources[0]", encoder)
    except RecipeError as problem:  # `cpt check` refuses it
        warnings.append(str(problem).rstrip("."))
    for warning in warnings:
        print_once(f"warning: {warning}.")
