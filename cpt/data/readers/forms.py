"""The form of a source's rows, documents or examples of four kinds, follows from the columns of a stage's trainer.

An example is a document whose text holds all of its parts (`example.py`). Its form travels with its source, as a
further entry of `chat`."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from cpt.errors import DataError, RecipeError
from cpt.recipe.huggingface_keys import columns_of_stage
from cpt.recipe.schema import Data, DocumentSource, Evaluation, Recipe, Source

Kind = TypeVar("Kind", bound=DocumentSource)
FORMS: dict[tuple[str, ...], str] = {
    ("text",): "document",
    ("messages",): "conversation",
    ("prompt", "chosen", "rejected"): "preference",
    ("prompt", "completion", "label"): "judged",
    ("prompt",): "prompt",
}
NAMED: dict[str, tuple[tuple[str, ...], ...]] = {
    "document": (("messages",), ("user", "assistant")),
    "conversation": (("messages",), ("prompt", "completion"), ("user", "assistant")),
    "preference": (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("user", "chosen", "rejected")),
    "judged": (("prompt", "completion", "label"), ("user", "assistant", "label"), ("messages", "label")),
    "prompt": (("prompt",), ("user",)),
}
"""What `chat` names for each form; a `user` and an `assistant` are texts that are one message each."""
BESIDE = ("tools", "system", "history")
"""What may be named with all of them."""
ALPACA = "{instruction}\n{input}"
ELSEWHERE: dict[str, tuple[dict[str, str], ...]] = {
    "conversation": ({"messages": "conversations"}, {"user": ALPACA, "assistant": "output"}),
    "preference": (
        {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        {"user": ALPACA, "chosen": "chosen", "rejected": "rejected"},
    ),
}
"""Columns of ShareGPT's and Alpaca's files, looked for where there are none of the names above."""
ONE_A_ROW = ("preference", "judged", "prompt")
FORM = "form"  # the entry of `chat` that tells it; no recipe writes it


def form_of(columns: Sequence[str]) -> str:
    """The form of data whose rows have these columns."""
    if "input_ids" in columns:  # a stage may also name the tensors of a packed row
        return "document"
    if tuple(columns) not in FORMS:
        known = "; ".join(", ".join(columns) for columns in FORMS)
        raise RecipeError(f"a stage's COLUMNS are {', '.join(columns) or 'none'}, and data is made for: {known}.")
    return FORMS[tuple(columns)]


def with_form(data: Data, evaluation: Evaluation, form: str) -> tuple[Data, Evaluation]:
    """The recipe's sections, each source with the form that its rows are read in.

    Held-out files of plain texts (txt and md files, those with a `template` or a `text_column` of their own) are
    documents in every form: all of a text is read, in windows, and its bits per byte are those that a run on documents
    finds.
    """
    if form != "document":
        sources = [
            source_with_form(source, form, f"data.sources[{number}]") for number, source in enumerate(data.sources)
        ]
        held_out = [
            source if is_plain(source) else source_with_form(source, form, f"evaluation.perplexity[{number}]")
            for number, source in enumerate(evaluation.perplexity)
        ]
        data = data.model_copy(update={"sources": sources})
        evaluation = evaluation.model_copy(update={"perplexity": held_out})
    for key, source in [
        *((f"data.sources[{number}]", source) for number, source in enumerate(data.sources)),
        *((f"evaluation.perplexity[{number}]", source) for number, source in enumerate(evaluation.perplexity)),
    ]:
        refuse_other_columns(source, key)
    return data, evaluation


def is_plain(source: DocumentSource) -> bool:
    stem = source.path.lower().removesuffix(".gz").removesuffix(".zst")
    is_text_file = stem.endswith((".txt", ".md"))
    return source.chat is None and (is_text_file or source.template is not None or source.text_column != "text")


def source_with_form(source: Kind, form: str, key: str) -> Kind:
    """The source with its form in `chat`."""
    chat = source.chat
    if isinstance(chat, str):
        if form not in ("conversation", "prompt"):
            raise RecipeError(
                f"`{key}.chat: {chat}` names one column, and this stage learns from {wanted(form)}: write `chat:"
                " {...}`."
            )
        chat = {"messages" if form == "conversation" else "prompt": chat}
    return source.model_copy(update={"chat": {**(chat or {}), FORM: form}})


def form_of_source(source: DocumentSource) -> str:
    return source.chat.get(FORM, "document") if isinstance(source.chat, Mapping) else "document"


def columns_named(source: DocumentSource) -> dict[str, str]:
    """What stands in which column, as the recipe tells it; nothing where it does not."""
    if isinstance(source.chat, str):
        return {"messages": source.chat}
    return {name: column for name, column in (source.chat or {}).items() if name != FORM}


def refuse_other_columns(source: DocumentSource, key: str) -> None:
    """Refuse a `chat` that names other columns than the form has."""
    form, named = form_of_source(source), tuple(name for name in columns_named(source) if name not in BESIDE)
    if source.chat is None or (not named and form != "document"):
        return
    if set(named) not in map(set, NAMED[form]):
        given = ", ".join(named) or "none"
        raise RecipeError(f"`{key}.chat` names the columns of {given}, and this stage learns from {wanted(form)}.")


def wanted(form: str) -> str:
    return " or ".join(", ".join(names) for names in NAMED[form])


def refuse_texts(source: DocumentSource, suffix: str, key: str) -> None:
    """Refuse files of plain text where each row is a pair, an answer or a prompt."""
    form = form_of_source(source)
    if form not in ONE_A_ROW:
        return
    needs = f"this stage learns from rows with the columns {wanted(form)} (jsonl, json, parquet, csv)"
    if isinstance(source, Source):
        remedy = f"Name such files, for example {source.path}/*.jsonl. Stages cpt and sft train on plain text"
    else:
        remedy = f"To measure the bits per byte of plain text, write {source.path}/*{suffix}"
    raise DataError(f"`{key}.path`: {source.path} holds {suffix} files, which are plain text, and {needs}. {remedy}.")


def refuse_layout(data: Data, form: str) -> None:
    """Refuse what makes rows of documents only."""
    if form == "document":
        return
    fitting = ("best_fit", "none", "token_budget") if form == "conversation" else ("best_fit", "none")
    if data.packing not in fitting:
        why = "one example is one row" if form in ONE_A_ROW else "an example is never cut into pieces"
        raise RecipeError(f"`data.packing: {data.packing}` is for documents: {why}. Write {' or '.join(fitting)}.")
    for number, phase in enumerate(data.phases):
        if phase.context_length is not None:
            raise RecipeError(
                f"`data.phases[{number}].context_length` is for documents: examples are not cut into pieces. Leave it"
                " out."
            )
    for number, source in enumerate(data.sources):
        if source.fill_in_the_middle is not None:
            raise RecipeError(
                f"`data.sources[{number}].fill_in_the_middle` is for documents, not for examples. Leave it out."
            )


# --- form of stage ---


def form_of_stage(stage: str) -> str:
    """`document`, `conversation`, `preference`, `judged` or `prompt`."""
    return form_of(columns_of_stage(stage))


def sections_of(recipe: Recipe) -> tuple[Data, Evaluation]:
    """The recipe's sections of data, each source with the form that its stage reads it in."""
    form = form_of_stage(recipe.stage)
    refuse_layout(recipe.data, form)
    return with_form(recipe.data, recipe.evaluation, form)
