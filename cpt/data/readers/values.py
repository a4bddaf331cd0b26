"""From a row to its text: which column, template or chat, and what a text must be."""

import math
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping, Sequence

from cpt.data.readers.chat import CONTROL
from cpt.data.readers.documents import BadValue, Document, Origin
from cpt.data.readers.example import BEFORE, columns_of_turns, example_columns, example_text, template_columns
from cpt.data.readers.forms import ELSEWHERE, NAMED, columns_named, form_of_source
from cpt.recipe.schema import DocumentSource, Source


def document_of(row: Mapping[str, object], source: DocumentSource, origin: Origin, number: int) -> Document:
    column = score_column(source)
    return Document(
        text_of(row, source), origin, number, math.nan if column is None else score_of(value_of(row, column), column)
    )


def score_column(source: DocumentSource) -> str | None:
    """The column that documents are ordered by; None where there is no order, or a function that tells it."""
    order = source.order_by if isinstance(source, Source) else None
    return None if order is None or ":" in order else order


def score_of(value: object, column: str) -> float:
    """A number, or a text that is one, as in csv files."""
    try:
        score = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        score = math.nan
    if math.isnan(score):
        raise BadValue(
            "null" if value is None else "wrong type", f"`{column}` is {kind(value)}, expected a number to order by"
        )
    return score


def text_of(row: Mapping[str, object], source: DocumentSource) -> str:
    if source.chat is not None:
        columns = columns_of_row(row, source)
        if "text" not in columns:
            return clean(example_text(row, source, columns), ", ".join(columns.values()))
        return refuse_marks(written_text(row, source))
    return written_text(row, source)


def columns_of_row(row: Mapping[str, object], source: DocumentSource) -> Mapping[str, str]:
    """What the row's example is made of; columns that are null in it count only where no others are there."""
    try:
        return example_columns(source, [name for name, value in row.items() if value is not None])
    except BadValue:
        return example_columns(source, list(row))


def refuse_marks(text: str) -> str:
    """A plain text among examples, which must not look like one."""
    if text.startswith(CONTROL):
        raise BadValue("control character", f"it begins with U+{ord(text[0]):04X}: this is no text")
    return text


def written_text(row: Mapping[str, object], source: DocumentSource) -> str:
    if source.template is None:
        return clean(value_of(row, source.text_column), source.text_column)
    values = {column: value_of(row, column) for column in template_columns(source.template)}
    return clean(
        source.template.format(**{column: filled_in(value, column) for column, value in values.items()}),
        "the template's text",
    )


def value_of(row: Mapping[str, object], column: str) -> object:
    if column not in row:
        raise missing_column(list(row), column)
    return row[column]


def clean(text: object, column: str) -> str:
    """A value that is a text, and one that can be written as UTF-8."""
    if not isinstance(text, str):
        raise BadValue("null" if text is None else "wrong type", f"`{column}` is {kind(text)}, expected a string")
    if "\0" in text:
        raise BadValue("NUL byte", f"a NUL byte at character {text.index(chr(0))} of `{column}`: this is no text")
    return text


def refuse_surrogates(text: str) -> str:
    """Half a character is no text; files' readers notice it by themselves, Python functions may give it."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise BadValue(
            "lone surrogate", f"a lone surrogate (half of a character) at character {problem.start}"
        ) from problem
    return text


def filled_in(value: object, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue(
            "null" if value is None else "wrong type", f"`{column}` is {kind(value)}, expected a string or a number"
        )
    return str(value)


def columns_of(source: DocumentSource, found: Sequence[str] | None = None) -> Sequence[str]:
    """The columns that the text is made of, and the one that it is ordered by.

    Args:
        found: those that are there, of which examples take what they find.
    """
    texts = text_columns(source) if source.chat is None else columns_of_examples(source, found)
    order = score_column(source)
    return texts if order is None or order in texts else (*texts, order)


def text_columns(source: DocumentSource) -> tuple[str, ...]:
    return (source.text_column,) if source.template is None else template_columns(source.template)


def columns_of_examples(source: DocumentSource, found: Sequence[str] | None) -> tuple[str, ...]:
    form, named = form_of_source(source), columns_of_turns(columns_named(source))
    if form == "document" or found is None:
        return named or (NAMED[form][0][0],)
    if form == "prompt":  # a reward may want any
        return tuple(dict.fromkeys([*named, *found]))
    usual = [name for names in NAMED[form] for name in names] + list(
        text_columns(source) if form == "conversation" else ()
    )
    usual += [name for columns in ELSEWHERE.get(form, ()) for name in columns_of_turns(columns)]
    wanted = dict.fromkeys([*(named or usual), "tools"])
    return tuple(name for name in wanted if name in found or name in needed_columns(source))


def needed_columns(source: DocumentSource) -> tuple[str, ...]:
    """The columns that the recipe names for examples, without those that a row need not have."""
    return columns_of_turns({name: written for name, written in columns_named(source).items() if name not in BEFORE})


def check_columns(found: Sequence[str], source: DocumentSource) -> None:
    """Refuse a file without the columns that the text is made of."""
    wanted = columns_of(source)
    if form_of_source(source) != "document":
        order, is_text = score_column(source), "text" in example_columns(source, found)
        wanted = [*(text_columns(source) if is_text else needed_columns(source)), *(() if order is None else (order,))]
    for column in wanted:
        if column not in found:
            raise missing_column(found, column)


def missing_column(found: Sequence[str], column: str) -> BadValue:
    return BadValue("missing column", f"no column `{column}`. It has: {', '.join(map(str, found)) or 'none'}")


def decode(raw: bytes) -> str:
    """UTF-8 text of a text file."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise BadValue("UTF-16", "UTF-16, expected UTF-8", 0) from problem
        what = f"invalid UTF-8 at byte {problem.start} (0x{raw[problem.start]:02x})"
        raise BadValue("invalid UTF-8", what, problem.start) from problem
    if "\0" in text:
        raise BadValue("NUL byte", f"a NUL byte at byte {raw.index(0)}: this is no text", raw.index(0))
    return text


def kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "a string",
    }
    return names.get(type(value), f"of type {type(value).__name__}")


def first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
