"""The first example of each source, written as the run would do it: is there a chat template, and the columns that rewards read?"""

from contextlib import suppress
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from cpt.data.checking.files import keyed_sources
from cpt.data.documents import Document
from cpt.data.encoders import encoder_of
from cpt.data.examples.chat_template import Refused
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.examples.example import example_of
from cpt.data.form_of_stage import sections_of
from cpt.data.forms import form_of_source
from cpt.data.sources import kind_of, pieces_of, read_piece
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import RecipeError
from cpt.preflight.found import PreflightReport
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.stages.rewards.find import check_columns


def check_first_examples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, found: PreflightReport) -> None:
    """Look at the first example of each source of examples that lies here; sources elsewhere are told of as unchecked."""
    for key, source in keyed_sources(*sections_of(recipe)):
        if form_of_source(source) != "document" and kind_of(source.path) == "local":
            found.run(partial(check_first, recipe, source, key, DocumentEncoder(tokenizer)))


def check_first(recipe: Recipe, source: DocumentSource, key: str, plain: DocumentEncoder) -> None:
    """Of one source.

    Raises:
        RecipeError: the tokenizer has no chat template, and there are messages.
        DataError: a reward reads a column that is not there.
    """
    encoder = encoder_of(source, plain, key)
    first = next((item for piece in islice(pieces_of(source, key), 1) for item in read_piece(source, piece, key)), None)
    if not isinstance(encoder, ExampleEncoder) or not isinstance(first, Document):
        return  # bad rows are told where the documents are looked at
    with suppress(Refused):  # of this one alone: a run leaves it out, and counts it
        encoder.writer.write(first.text)
    example = example_of(first.text)
    if example is not None and example.columns is not None and key.startswith("data."):
        with suppress(RecipeError):  # told where rewards are looked at
            check_columns(recipe.rewards, list(example.columns))
