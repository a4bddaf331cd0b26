"""The data of a run, in the form that its stage trains on."""

from transformers import PreTrainedTokenizerBase

from cpt.data.build import build_data
from cpt.data.prepared import PreparedData
from cpt.data.readers.forms import form_of_stage
from cpt.recipe.schema import Recipe


def data_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """All that the recipe's run reads.

    Raises:
        CptError: see `build_data`.
    """
    return build_data(
        recipe.data,
        tokenizer,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        budget=recipe.budget,
        form=form_of_stage(recipe.stage),
    )
