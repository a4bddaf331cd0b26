"""Which encoder the documents of a source need: that of texts, of gaps to fill, of chats, or of examples."""

from cpt.data.examples.chat_encoder import ChatEncoder
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.fill_in_the_middle import MiddleEncoder
from cpt.data.forms import form_of_source
from cpt.data.tokenization import DocumentEncoder
from cpt.recipe.schema import DocumentSource, Source


def encoder_of(source: DocumentSource, encoder: DocumentEncoder, key: str) -> DocumentEncoder:
    """The tokenizer's encoder, as the source asks for it.

    Args:
        key: where the source stands in the recipe, for messages.

    Raises:
        RecipeError: the tokenizer has no chat template, or no marks for gaps.
    """
    if form_of_source(source) != "document":
        return ExampleEncoder(encoder, source, key)
    if source.chat is not None:
        return ChatEncoder(encoder, key)
    if isinstance(source, Source) and source.fill_in_the_middle is not None:
        return MiddleEncoder(encoder, source.fill_in_the_middle, key)
    return encoder
