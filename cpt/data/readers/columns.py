"""Choose the columns of a row that make up a document or example.

Rows have one of five forms: documents, or examples of four kinds. The form follows from the columns of a stage's
trainer. It is stored with the source, as an extra entry of `chat`."""

import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

from cpt.data.readers.documents import BadValue
from cpt.errors import DataError, RecipeError
from cpt.recipe.huggingface_keys import columns_of_stage
from cpt.recipe.paths import TEXT_FILES, document_suffix
from cpt.recipe.schema import Data, DocumentSource, Evaluation, Recipe

Kind = TypeVar("Kind", bound=DocumentSource)
FORMS: dict[tuple[str, ...], str] = {
    ("text",): "document",
    ("messages",): "conversation",
    ("prompt", "chosen", "rejected"): "preference",
    ("prompt", "completion", "label"): "unpaired",
    ("prompt",): "prompt",
}
# what `chat` names; `user` and `assistant` are one message each
NAMED: dict[str, tuple[tuple[str, ...], ...]] = {
    "document": (("messages",), ("user", "assistant")),
    "conversation": (("messages",), ("prompt", "completion"), ("user", "assistant")),
    "preference": (
        ("prompt", "chosen", "rejected"),
        ("chosen", "rejected"),
        ("user", "chosen", "rejected"),
    ),
    "unpaired": (
        ("prompt", "completion", "label"),
        ("user", "assistant", "label"),
        ("messages", "label"),
    ),
    "prompt": (("prompt",), ("user",)),
}
# Columns that `chat` may name in every form: they come before the messages of an example, and a row may lack them.
BEFORE = ("system", "history")
BESIDE = ("tools", *BEFORE)
ALPACA = "{instruction}\n{input}"
# ShareGPT and Alpaca columns, tried after NAMED
ELSEWHERE: dict[str, tuple[dict[str, str], ...]] = {
    "conversation": ({"messages": "conversations"}, {"user": ALPACA, "assistant": "output"}),
    "preference": (
        {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        {"user": ALPACA, "chosen": "chosen", "rejected": "rejected"},
    ),
}
ONE_A_ROW = ("preference", "unpaired", "prompt")
FORM = "form"  # the entry of `chat` with the form; internal, recipes never contain it


def form_of(columns: Sequence[str]) -> str:
    if "input_ids" in columns:  # a stage may also name the tensors of a packed row
        return "document"
    if tuple(columns) not in FORMS:
        known_forms = "; ".join(", ".join(columns) for columns in FORMS)
        raise RecipeError(
            f"a stage's COLUMNS are {', '.join(columns) or 'none'}, expected those of: {known_forms}."
        )
    return FORMS[tuple(columns)]


def with_form(data: Data, evaluation: Evaluation, form: str) -> tuple[Data, Evaluation]:
    """Held-out plain texts (txt and md files, sources with a `template` or a `text_column`) stay documents in every
    form, so the whole text is evaluated, in bits per byte comparable to runs on documents."""
    sources = [
        source_with_form(source, form, f"data.sources[{number}]")
        for number, source in enumerate(data.sources)
    ]
    held_out = []
    for number, source in enumerate(evaluation.perplexity):
        is_text_file = document_suffix(source.path) in TEXT_FILES
        has_text = is_text_file or source.template is not None or source.text_column != "text"
        own_form = "document" if source.chat is None and has_text else form
        held_out.append(source_with_form(source, own_form, f"evaluation.perplexity[{number}]"))
    return data.model_copy(update={"sources": sources}), evaluation.model_copy(
        update={"perplexity": held_out}
    )


def source_with_form(source: Kind, form: str, key: str) -> Kind:
    chat = source.chat
    if form != "document":
        if isinstance(chat, str):
            if form not in ("conversation", "prompt"):
                learns = f"this stage learns from {wanted(form)}: write `chat: {{...}}`."
                raise RecipeError(f"`{key}.chat: {chat}` names one column, but {learns}")
            chat = {"messages" if form == "conversation" else "prompt": chat}
        source = source.model_copy(update={"chat": {**(chat or {}), FORM: form}})
    named = [name for name in columns_named(source) if name not in BESIDE]
    if (
        source.chat is not None
        and (named or form == "document")
        and set(named) not in map(set, NAMED[form])
    ):
        given_columns = ", ".join(named) or "none"
        raise RecipeError(
            f"`{key}.chat` names the columns of {given_columns}, but this stage learns from {wanted(form)}."
        )
    return source


def form_of_source(source: DocumentSource) -> str:
    return source.chat.get(FORM, "document") if isinstance(source.chat, Mapping) else "document"


def columns_named(source: DocumentSource) -> dict[str, str]:
    if isinstance(source.chat, str):
        return {"messages": source.chat}
    named = dict(source.chat or {})
    named.pop(FORM, None)
    return named


def wanted(form: str) -> str:
    return " or ".join(map(", ".join, NAMED[form]))


def refuse_texts(source: DocumentSource, suffix: str, key: str) -> None:
    """Reject plain text files for stages whose rows are a pair, an answer or a prompt."""
    form = form_of_source(source)
    if form not in ONE_A_ROW:
        return
    needs = f"this stage learns from rows with the columns {wanted(form)}"
    remedy = f"Name such files, for example {source.path}/*.jsonl. Stages cpt and sft train on plain text."
    raise DataError(
        f"`{key}.path`: {source.path} has {suffix} files, which are plain text, but {needs}. {remedy}"
    )


def refuse_layout(data: Data, form: str) -> None:
    if form == "document":
        return
    fitting = (
        ("best_fit", "none", "token_budget") if form == "conversation" else ("best_fit", "none")
    )
    if data.packing not in fitting:
        reason = (
            "one example is one row" if form in ONE_A_ROW else "an example is never cut into pieces"
        )
        raise RecipeError(
            f"`data.packing: {data.packing}` is for documents: {reason}. Write {' or '.join(fitting)}."
        )
    for key in keys_for_documents(data):
        raise RecipeError(f"`{key}` is for documents: examples are not cut into pieces. Remove it.")


def keys_for_documents(data: Data) -> Iterator[str]:
    for number, phase in enumerate(data.phases):
        if phase.context_length is not None:
            yield f"data.phases[{number}].context_length"
    for number, source in enumerate(data.sources):
        if source.fill_in_the_middle:
            yield f"data.sources[{number}].fill_in_the_middle"


def form_of_stage(stage: str) -> str:
    return form_of(columns_of_stage(stage))


def sections_of(recipe: Recipe) -> tuple[Data, Evaluation]:
    form = form_of_stage(recipe.stage)
    refuse_layout(recipe.data, form)
    return with_form(recipe.data, recipe.evaluation, form)


@cache
def template_columns(template: str) -> tuple[str, ...]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as problem:
        hint = "Write a column as {title}, a brace as {{."
        raise RecipeError(f"the template {template!r} is not valid: {problem}. {hint}") from problem
    names: list[str] = []
    is_valid = True
    for _, name, form, conversion in parts:
        if name is None:
            continue
        names.append(name)
        if not is_plain_name(name) or form or conversion:
            is_valid = False
    if not is_valid or not names:
        raise RecipeError(
            f"the template {template!r} must name columns, as in {{title}}, and nothing else in braces."
        )
    return tuple(dict.fromkeys(names))


def is_plain_name(name: str) -> bool:
    """Whether a name in a template is not that of an argument's number or item."""
    return name != "" and not set(name) & set("[]") and not name.isdigit()


def columns_in(setting: str) -> tuple[str, ...]:
    """The columns in an entry of `chat`: one name, or those of a template."""
    return template_columns(setting) if "{" in setting else (setting,)


def columns_of_turns(named: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(map(columns_in, named.values()))))


def example_columns(source: DocumentSource, present: Sequence[str]) -> dict[str, str]:
    """Part of the example -> its column or template; `present` are the columns of the file."""
    form = form_of_source(source)
    named = columns_named(source)
    has_tools = "tools" in named or "tools" in present and form != "document"
    tools = {"tools": named.get("tools", "tools")} if has_tools else {}
    before: dict[str, str] = {}
    columns: dict[str, str] = {}
    for name in BEFORE:
        if name in named:
            before[name] = named[name]
    for name, column in named.items():
        if name not in BESIDE:
            columns[name] = column
    if not columns:
        columns = usual_columns(form, present, source)
    if "text" in columns:  # or its template: read as in any document
        return columns
    first_columns = [columns_in(column)[0] for column in columns.values()]
    for column in [*first_columns, *tools.values()]:
        if top_column(column, present) not in present:
            raise missing_column(present, column)
    return {**before, **columns, **tools}


def usual_columns(form: str, present: Sequence[str], source: DocumentSource) -> dict[str, str]:
    """The usual columns for this form; with several kinds of examples, the first kind that is present."""
    if form == "conversation" and (source.template is not None or source.text_column != "text"):
        return {"text": source.text_column}
    kinds = [dict(zip(names, names, strict=True)) for names in NAMED[form]]
    kinds += ELSEWHERE.get(form, ())
    # Kinds with a prompt first.
    for columns in sorted(kinds, key=lambda columns: set(columns) == {"chosen", "rejected"}):
        if all(columns_in(column)[0] in present for column in columns.values()):
            return columns
    if form == "conversation" and source.text_column in present:
        return {"text": source.text_column}
    nearest = min(NAMED[form], key=lambda names: len({*names} - {*present}))
    missing = " and ".join(f"`{name}`" for name in nearest if name not in present)
    columns_of_form = ", ".join(f"{name}: COLUMN" for name in NAMED[form][0])
    raise BadValue(
        "missing columns",
        f"no column {missing}, which a stage for a {form} reads. Found: {', '.join(present) or 'none'}. Name them:"
        f" `chat: {{{columns_of_form}}}`",
    )


def row_columns(row: Mapping[str, object], source: DocumentSource) -> Mapping[str, str]:
    """Like `example_columns`; columns that are null in this row are used only if all are null."""
    try:
        return example_columns(source, [name for name, value in row.items() if value is not None])
    except BadValue:
        return example_columns(source, list(row))


def columns_of(source: DocumentSource, present: Sequence[str] | None = None) -> Sequence[str]:
    """The columns of the text; `present` are the columns of the file."""
    form = form_of_source(source)
    named = columns_of_turns(columns_named(source))
    if source.chat is None:
        columns = text_columns(source)
        return columns if present is None else top_columns(columns, present)
    if not named and (form == "document" or present is None):
        return (NAMED[form][0][0],)
    if present is None:
        return named
    named = top_columns(named, present)
    if form == "document":
        return named
    if form == "prompt":  # a reward may use any column
        return tuple(dict.fromkeys([*named, *present]))
    usual = list(chain.from_iterable(NAMED[form]))
    if form == "conversation":
        usual += text_columns(source)
    for kind in ELSEWHERE.get(form, ()):
        usual += columns_of_turns(kind)
    candidates = dict.fromkeys([*(named or usual), "tools"])
    needed = needed_columns(source)
    return tuple(name for name in candidates if name in present or name in needed)


def text_columns(source: DocumentSource) -> tuple[str, ...]:
    return (source.text_column,) if source.template is None else template_columns(source.template)


def needed_columns(source: DocumentSource) -> tuple[str, ...]:
    """The columns that the recipe names for examples, without the optional ones."""
    named = columns_named(source)
    for name in BEFORE:
        named.pop(name, None)
    return columns_of_turns(named)


def check_columns(present: Sequence[str], source: DocumentSource) -> None:
    if form_of_source(source) == "document":
        needed = columns_of(source)
    elif "text" in example_columns(source, present):
        needed = text_columns(source)
    else:
        needed = needed_columns(source)
    for column in needed:
        top = top_column(column, present)
        if top not in present:
            raise missing_column(present, column)
        if present.count(top) > 1:
            raise BadValue(
                "columns of one name", f"{present.count(top)} columns are called `{top}`"
            )


def missing_column(present: Sequence[str], column: str) -> BadValue:
    return BadValue(
        "missing column", f"no column `{column}`. Found: {', '.join(map(str, present)) or 'none'}"
    )


def value_of(row: Mapping[str, object], column: str) -> object:
    """The value of a column, or of a nested one: `meta.text`."""
    if column in row:
        return row[column]
    top, _, rest = column.partition(".")
    inside = row.get(top)
    if not rest or not isinstance(inside, Mapping):
        raise missing_column(list(row), column)
    return value_of(inside, rest)


def value_or_none(row: Mapping[str, object], column: str) -> object:
    if column in row:
        return row[column]
    top, _, rest = column.partition(".")
    inside = row.get(top)
    return value_or_none(inside, rest) if rest and isinstance(inside, Mapping) else None


def top_columns(columns: Sequence[str], present: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(top_column(column, present) for column in columns))


def top_column(column: str, present: Sequence[str]) -> str:
    """The column of a file that has a nested column: `meta` for `meta.text`."""
    return column if column in present else column.partition(".")[0]
