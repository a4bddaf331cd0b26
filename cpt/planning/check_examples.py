"""The first example of each source: is there a chat template, and the columns that rewards read?"""

from contextlib import suppress
from itertools import islice

from transformers import PreTrainedTokenizerBase

from cpt.data.examples.chat_template import Refused
from cpt.data.examples.encoder import ExampleEncoder, encoder_of
from cpt.data.open_sources import keyed_sources
from cpt.data.readers.columns import form_of_source, sections_of
from cpt.data.readers.documents import Document
from cpt.data.readers.example import example_of
from cpt.data.readers.sources import kind_of, pieces_of, read_piece
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.planning.findings import PreflightReport
from cpt.recipe.schema import Data, DocumentSource, Recipe
from cpt.stages.rewards.find import check_columns


def check_first_examples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, found: PreflightReport) -> None:
    """Check each local source of examples; others are reported as unchecked."""
    for key, source in keyed_sources(*sections_of(recipe)):
        if form_of_source(source) != "document" and kind_of(source.path) == "local":
            found.run(check_first, recipe, source, key, DocumentEncoder(tokenizer))


def check_conversations(data: Data) -> None:
    """Raises:
    DataError: stage `sft` has plain text only.
    """
    keyed = [(f"data.sources[{number}]", source) for number, source in enumerate(data.sources)]
    if any(form_of_source(source) != "conversation" or kind_of(source.path) != "local" for _, source in keyed):
        return
    firsts = [(key, first_document(source, key)) for key, source in keyed]
    texts = [(key, first) for key, first in firsts if first is not None and is_plain_text(first)]
    if texts and len(texts) == len(firsts):
        key, first = texts[0]
        raise DataError(
            f"`{key}.path`: {first.where} is plain text, and stage `sft` needs conversations. To train on text write"
            " `stage: cpt`; for conversations, `chat` names their columns: `chat: messages`, `chat: {prompt: question,"
            " completion: answer}`."
        )


def is_plain_text(document: Document) -> bool:
    example = example_of(document.text)
    return example is not None and isinstance(example.messages, str)


def first_document(source: DocumentSource, key: str) -> Document | None:
    first = next(
        (item for piece in islice(pieces_of(source, key), 1) for item in read_piece(source, piece, key)), None
    )
    return first if isinstance(first, Document) else None


def check_first(recipe: Recipe, source: DocumentSource, key: str, plain: DocumentEncoder) -> None:
    """Raises:
    RecipeError: there are messages, and the tokenizer has no chat template.
    DataError: a reward reads a missing column.
    """
    encoder = encoder_of(source, plain, key)
    first = first_document(source, key)
    if not isinstance(encoder, ExampleEncoder) or first is None:
        return  # the check of documents reports bad rows
    with suppress(Refused):  # a run skips such a document and counts it
        encoder.writer.write(first.text)
    example = example_of(first.text)
    if example is not None and example.columns is not None and key.startswith("data."):
        with suppress(RecipeError):  # the check of rewards reports it
            check_columns(recipe.rewards, list(example.columns))
