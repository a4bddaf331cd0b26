"""`cpt init DOCUMENTS --model MODEL --gpu GPU`: a commented recipe, or the reason why there can be none."""

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored
from cpt.data.held_out import size_warnings
from cpt.data.readers.files import kind_of
from cpt.data.readers.sources import files_with_sizes
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.evaluation.paired import FEW
from cpt.hardware import find_gpus
from cpt.init.documents import TOKENISED, DocumentFacts, read_documents
from cpt.init.rules import ADAPTERS_ONLY, LORA_FACTOR, BaseModel, Choices, Shift, choose, read_base
from cpt.planner.target import Target, find_target
from cpt.ranks import tell
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import DocumentSource
from cpt.runs.record import EXPORT

NO_REPLAY, PUBLIC_GENERAL = "none", "HuggingFaceFW/fineweb-edu"
TOKENS_OF_A_PAGE = 800  # of fineweb-edu: about 1,000; fewer, so that there are enough
WIDTH = 118
WORDS_OF_YAML = {"null", "true", "false", "yes", "no", "on", "off"}
FIRST_WORDS = re.compile(r"(\S+\s+){7}\S+")  # with the line breaks and the indentation of code


def command(
    documents: Annotated[
        str | None, typer.Argument(help="File, folder or glob: txt, md, jsonl, json, parquet, csv, tsv, arrow.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or Hub id of the base model.")] = None,
    gpu: Annotated[str | None, typer.Option(help='"RTX 4090", A100-80GB, H100, ...; or cpu.')] = None,
    gpus: Annotated[int, typer.Option(help="How many of them.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="The recipe's file.")] = Path("recipe.yaml"),
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency: adds the cost.")] = None,
    general: Annotated[
        str | None, typer.Option(help="What is replayed: documents of yours, a Hub dataset, or none.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column or JSON key of the text.")] = None,
    tokens: Annotated[int | None, typer.Option(help="The budget in tokens.", min=1)] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of the machine's own memory, for offloading.")] = None,
    full: Annotated[
        bool | None, typer.Option("--full/--lora", help="All parameters or adapters, instead of what fits.")
    ] = None,
    shift: Annotated[
        Shift | None, typer.Option(help="How far the documents are from what the base read, if you know.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Write a recipe for these documents, this model and this machine; without the three, ask for them.

    Example: cpt init papers/ --model Qwen/Qwen2.5-1.5B --gpu "RTX 4090" --price-per-gpu-hour 0.4
    """
    if documents is None or model is None or gpu is None:
        documents, model, gpu = ask(documents, model, gpu)
    if output.exists() and not force:
        raise RecipeError(f"{output} exists. Choose another name with --output, or write over it with --force.")
    target = find_target(gpu, gpus, host_memory)
    refuse_ignored({"--gpus": gpus > 1 and target.on_cpu}, "with --gpu cpu")
    check_general(general)
    base = read_base(model)
    facts = read_documents(documents, text_column, DocumentEncoder(base.tokenizer))
    choices = choose(facts, base, target, with_replay=general != NO_REPLAY, tokens=tokens, full=full, shift=shift)
    cost = format_cost(choices, target, price_per_gpu_hour)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        recipe_text(facts, base, target, choices, cost, output=output, general=general), encoding="utf-8"
    )
    recipe = load_recipe(output)  # shape and sense; `cpt check` looks at what it refers to
    tell(f"Documents: {format_documents(facts)}")
    tell(f"Tokens: {format_tokens(facts)}")
    tell(f"Cost: {cost}")
    domain = recipe.data.model_copy(update={"sources": recipe.data.sources[:1]})  # without the replay
    for warning in size_warnings(domain, recipe.evaluation, few=FEW):
        tell(f"warning: {warning}.")
    tell(f"{output} is written; its comments give the reasons. Next: cpt check {output}")


def ask(documents: str | None, model: str | None, gpu: str | None) -> tuple[str, str, str]:
    """Ask for what the command line left open.

    Raises:
        RecipeError: this is no terminal.
    """
    if not sys.stdin.isatty():
        given = {"DOCUMENTS": documents, "--model": model, "--gpu": gpu}
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise RecipeError(f"{missing} missing. Write: cpt init DOCUMENTS --model MODEL --gpu GPU (or --gpu cpu).")
    here = found[0].name if (found := find_gpus()) else "cpu"
    documents = documents or str(typer.prompt("Where are your documents (file, folder or glob)?"))
    model = model or str(typer.prompt("Which model shall learn from them (folder or Hub id)?"))
    return documents, model, gpu or str(typer.prompt("On which GPU?", default=here))


def check_general(general: str | None) -> None:
    """Raises:
    DataError: a local folder to replay does not exist.
    """
    if general in (None, NO_REPLAY) or kind_of(str(general)) != "local":
        return
    try:
        files_with_sizes(DocumentSource(path=str(general)), "GENERAL")
    except DataError as problem:
        text = str(problem).split(" Set `GENERAL.path`")[0].rstrip(".")
        raise DataError(f"--general: {text}. Without --general, the public {PUBLIC_GENERAL} is taken.") from problem


def format_documents(facts: DocumentFacts) -> str:
    formats = ", ".join(f"{count:,} {name}" for name, count in facts.formats.most_common())
    number = f"{'' if facts.is_whole else 'about '}{facts.documents:,}"
    parts = [f"{number} in {formats} files, {facts.text_bytes / 1e6:,.3g} MB of text"]
    if facts.languages is None:
        parts.append("languages unknown (pip install 'cpt[language]')")
    else:
        of = facts.languages.total()
        common = [f"{code} {100 * count / of:.0f} %" for code, count in facts.languages.most_common(3)]
        parts.append(f"languages {', '.join(common)} (py3langid)")
    parts.append(f"{facts.bad_rows:,} bad rows" + (f" (the first: {facts.first_bad})" if facts.bad_rows else ""))
    parts.append(f"{100 * facts.repeats / facts.documents_read:.1f} % repeat another word for word")
    return "; ".join(parts) + "."


def format_tokens(facts: DocumentFacts) -> str:
    is_count = facts.is_whole and facts.documents <= TOKENISED
    how = "" if is_count else f", estimated from {TOKENISED} documents"
    return f"{'' if is_count else 'about '}{facts.tokens:,} with the base's tokenizer{how}."


def format_cost(choices: Choices, target: Target, price: float | None) -> str:
    expected, least, most = choices.way.hours
    money = ""
    if price is not None and target.gpus:
        money = f"; {expected * target.gpus * price:,.2f} at {price:g} per GPU hour"
    span = f"about {format_hours(expected)}, {format_hours(least)} to {format_hours(most)}"
    return f"{span}, by assumed shares of the peak{money}. Evaluation and saving come on top."


def format_hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours >= 1 / 60 else f"{max(1, hours * 3600):.0f} s"


def recipe_text(
    facts: DocumentFacts,
    base: BaseModel,
    target: Target,
    choices: Choices,
    cost: str,
    *,
    output: Path,
    general: str | None,
) -> str:
    """The recipe with a reason above each choice.

    Args:
        general: what is replayed: a path, a dataset on the Hub, or None for the public set.
    """
    way, source, known = choices.way, facts.source, base.known
    folder = Path(base.path).parent if Path(base.path).name == EXPORT else Path(base.path)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.name}-{Path(source.path).stem}").strip("-._") or "cpt"
    start = f"cpt train {output}" + (f" --processes {target.gpus}" if target.gpus > 1 else "")
    where = f"{target.gpus} x {target.name}" if target.gpus else "the CPU"
    lines = [
        comment(
            f"Continued pre-training of {base.path} on {source.path}, written by `cpt init`. Change what you like."
        ),
        "#",
        f"#   cpt check {output}    finds every mistake before GPU time is spent",
        f"#   {start}    runs it",
        "#",
        comment(f"Documents: {format_documents(facts)} Make sure that you may train on them."),
        comment(f"Tokens: {format_tokens(facts)}"),
        comment(f"Cost on {where}: {cost}"),
        f"name: {name}",
        "stage: cpt",
        "seed: 42",
        "",
        "model:",
        f"  path: {plain(base.path)}",
    ]
    refused = next((one for one in reversed(way.refused) if one.startswith("all")), "")
    if way.name == "full":
        lines += [comment("All parameters fit. They learn more than adapters and forget more (arXiv 2405.09673).", 2)]
        lines += ["  lora: null"]
    else:
        why = f"Adapters, since {refused} by plan" if refused else "Adapters, as asked"
        with_head = "with embeddings and head" if way.name == "lora" else "without embeddings and head"
        lines += [comment(f"{why}. They learn and forget less (arXiv 2405.09673). On all layers, {with_head}.", 2)]
        lines += ["  lora: cpt" if way.name == "lora" else f"  lora: {json.dumps(ADAPTERS_ONLY)}"]
    why = ", as in the base's own training" if known and known.sequence_length == choices.sequence_length else ""
    lines += ["", "data:", comment(f"Tokens of a row{why}; longer rows cost more for each token.", 2)]
    lines += [f"  sequence_length: {choices.sequence_length}"]
    if not base.packs_documents:
        lines += [comment("This architecture reads a row from end to end: a row is a batch of padded documents.", 2)]
        lines += ["  packing: token_budget"]
    if facts.repeats:
        share = f"{100 * facts.repeats / facts.documents_read:.1f} %"
        lines += [comment(f"{share} of the documents repeat another; also: near (pip install 'cpt[dedup]').", 2)]
        lines += ["  deduplicate: exact"]
    if facts.bad_rows:
        lines += [comment("`cpt data check` lists the bad rows.", 2), "  on_bad_row: skip"]
        lines += [f"  max_bad_share: {max(0.001, round(1.5 * facts.bad_share, 4))}"]
    lines += ["  sources:", "    - name: domain", f"      path: {plain(source.path)}"]
    lines += [f"      text_column: {plain(source.text_column)}"] if source.text_column != "text" else []
    lines += [f"      weight: {1 - choices.replay:g}", *replay_source(choices, general)]
    rate = f"{choices.rate_reason[0].upper()}{choices.rate_reason[1:]}"
    lines += [
        "",
        "budget:",
        comment(
            f"{choices.epochs:.2g} times through the documents, with the replay. Up to 4 times is nearly as good as"
            " new text (arXiv 2305.16264).",
            2,
        ),
        f"  tokens: {choices.tokens:_}",
        comment(f"Tokens of a step, on any number of GPUs: {choices.tokens // choices.batch_tokens:,} steps.", 2),
        f"  global_batch_tokens: {choices.batch_tokens:_}",
        "",
        "optimizer:",
        "  name: adamw",
        comment(f"{rate}. A higher one learns more and forgets more.", 2),
        f"  learning_rate: {number(choices.learning_rate)}",
    ]
    if way.name == "lora":
        lines += [comment("Embeddings and head move ten times less: each row is one token's.", 2)]
        lines += [f"  embedding_learning_rate: {number(choices.learning_rate / LORA_FACTOR)}"]
    schedule = f"{{name: rewarm_cosine, warmup_tokens: {choices.warmup_tokens:_}, floor: 0.1}}"
    fifth, often = (max(choices.batch_tokens, choices.tokens // times) for times in (5, choices.evaluations))
    held_out, what = (
        round(choices.held_out_share * facts.documents),
        "domain and general" if choices.replay else "domain",
    )
    lines += [
        "  betas: [0.9, 0.95]",
        "  weight_decay: 0.1",
        "",
        comment("The base's schedule has ended: warm up again, then fall to a tenth (arXiv 2403.08763)."),
        f"schedule: {schedule}",
        "",
        f"checkpoints: {{every_tokens: {fifth:_}, keep: 2}}",
        "",
        "evaluation:",
        comment(f"About {held_out:,} documents are not trained on: bits per byte of {what} text.", 2),
        f"  held_out_share: {choices.held_out_share:g}",
    ]
    if choices.replay:
        lines += [comment("A number, such as 0.02, stops the run at 2 % more bits per byte of general text.", 2)]
        lines += ["  retain: {general-replay: null}"]
    lines += [f"  every_tokens: {often:_}"] if choices.evaluations > 1 else []
    lines += [comment("What the model writes from here on, before and after.", 2), "  prompts:"]
    texts = sorted((text.strip() for text in facts.sample if len(text.split()) > 20), key=len)
    beginnings = [found[0] for text in texts[len(texts) // 2 :][:2] if (found := FIRST_WORDS.match(text))]
    lines += [f"    - {json.dumps(prompt, ensure_ascii=False)}" for prompt in beginnings or ["The"]]
    memory = f"{way.memory_gib:.1f} of {target.memory_gib:.3g} GiB"
    lines += [
        "",
        "training:                            # Hugging Face's own keys",
        comment(f"About {memory} by plan; `cpt plan` shows its parts.", 2),
        f"  per_device_train_batch_size: {way.micro_batch}",
        f"  gradient_checkpointing: {'true' if way.checkpointing else 'false'}",
    ]
    lines += ["  bf16: true"] if not target.on_cpu else []
    if way.profile:
        lines += [comment("deepspeed_configs/README.md describes the profiles.", 2), f"  deepspeed: {way.profile}"]
    return "\n".join([*lines, "  max_grad_norm: 1.0", "  logging_steps: 10"]) + "\n"


def replay_source(choices: Choices, general: str | None) -> list[str]:
    if not choices.replay:
        return [comment("Nothing is replayed, as asked: expect the model to forget. See recipes/presets/replay/.", 4)]
    shift = "a strong shift, for which 25 %" if choices.is_strong_shift else "a weak shift, for which 1 to 5 %"
    reason = f"Replay against forgetting, for {shift} was enough (arXiv 2403.08763): {choices.shift_reason}."
    lines = [comment(reason, 4), "    - name: general-replay"]
    if general is None:
        pages = round(1.2 * choices.replay * choices.tokens / TOKENS_OF_A_PAGE) + 1000
        lines += [
            comment("Best is text like the base's own; web pages stand in for it. Another: --general FOLDER.", 6),
            f"      path: {PUBLIC_GENERAL}",
            "      subset: sample-10BT",
            f"      max_documents: {pages:_}",
            "      licence: ODC-By-1.0",
        ]
    else:
        lines.append(f"      path: {plain(general)}")
    return [*lines, f"      weight: {choices.replay:g}"]


def comment(text: str, indent: int = 0) -> str:
    lead = " " * indent + "# "
    return textwrap.fill(
        text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False, break_on_hyphens=False
    )


def plain(text: str) -> str:
    """The text as a YAML value: unquoted if nothing in it means something else."""
    is_simple = re.fullmatch(r"(\.{0,2}/|~/)?[A-Za-z_][A-Za-z0-9_./-]*", text) and text.lower() not in WORDS_OF_YAML
    return text if is_simple else json.dumps(text, ensure_ascii=False)


def number(value: float) -> str:
    """`1e-5`, as people write it."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
