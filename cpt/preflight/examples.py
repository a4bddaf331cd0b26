"""The first example of each source, written as the run would do it: is there a chat template, and the columns that
rewards read?"""

from contextlib import suppress
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from cpt.data.examples.chat_template import Refused
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.examples.encoders import encoder_of
from cpt.data.open_sources import keyed_sources
from cpt.data.readers.documents import Document
from cpt.data.readers.example import example_of
from cpt.data.readers.forms import form_of_source, sections_of
from cpt.data.readers.sources import kind_of, pieces_of, read_piece
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.preflight.found import PreflightReport
from cpt.recipe.schema import Data, DocumentSource, Recipe
from cpt.stages.rewards.find import check_columns


def check_first_examples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, found: PreflightReport) -> None:
    """Look at the first example of each source of examples that lies here; sources elsewhere are told of as
    unchecked."""
    for key, source in keyed_sources(*sections_of(recipe)):
        if form_of_source(source) != "document" and kind_of(source.path) == "local":
            found.run(partial(check_first, recipe, source, key, DocumentEncoder(tokenizer)))


def check_conversations(data: Data) -> None:
    """`sft` learns from conversations, and from plain text only beside them.

    Raises:
        DataError: no source has any.
    """
    keyed = [(f"data.sources[{number}]", source) for number, source in enumerate(data.sources)]
    if any(form_of_source(source) != "conversation" or kind_of(source.path) != "local" for _, source in keyed):
        return
    firsts = [(key, first_document(source, key)) for key, source in keyed]
    texts = [(key, first) for key, first in firsts if first is not None and is_plain_text(first)]
    if texts and len(texts) == len(firsts):
        key, first = texts[0]
        raise DataError(
            f"`{key}.path`: {first.where} is plain text, and stage `sft` learns from conversations, of which no source"
            " has any. To train on text write `stage: cpt`; for conversations, `chat` names their columns: `chat:"
            " messages`, `chat: {prompt: question, completion: answer}`."
        )


def is_plain_text(document: Document) -> bool:
    """Whether a document of a source of conversations is none."""
    example = example_of(document.text)
    return example is not None and isinstance(example.messages, str)


def first_document(source: DocumentSource, key: str) -> Document | None:
    """The first row of a source, where it is a document."""
    first = next(
        (item for piece in islice(pieces_of(source, key), 1) for item in read_piece(source, piece, key)), None
    )
    return first if isinstance(first, Document) else None


def check_first(recipe: Recipe, source: DocumentSource, key: str, plain: DocumentEncoder) -> None:
    """Of one source.

    Raises:
        RecipeError: the tokenizer has no chat template, and there are messages.
        DataError: a reward reads a column that is not there.
    """
    encoder = encoder_of(source, plain, key)
    first = first_document(source, key)
    if not isinstance(encoder, ExampleEncoder) or first is None:
        return  # bad rows are told where the documents are looked at
    with suppress(Refused):  # of this one alone: a run leaves it out, and counts it
        encoder.writer.write(first.text)
    example = example_of(first.text)
    if example is not None and example.columns is not None and key.startswith("data."):
        with suppress(RecipeError):  # told where rewards are looked at
            check_columns(recipe.rewards, list(example.columns))
