"""The form of data that a stage trains on, before anything heavy is imported."""

from cpt.data.forms import form_of, refuse_layout, with_form
from cpt.recipe.schema import Data, Evaluation, Recipe
from cpt.recipe.stage_columns import columns_of_stage


def form_of_stage(stage: str) -> str:
    """`document`, `conversation`, `preference`, `judged` or `prompt`.

    Raises:
        RecipeError: there is no such stage, or its columns are of no form.
    """
    return form_of(columns_of_stage(stage))


def sections_of(recipe: Recipe) -> tuple[Data, Evaluation]:
    """The recipe's sections of data, each source with the form that its stage reads it in.

    Raises:
        RecipeError: `chat` names other columns than the form has, or rows are made in a way that is only for
        documents.
    """
    form = form_of_stage(recipe.stage)
    refuse_layout(recipe.data, form)
    return with_form(recipe.data, recipe.evaluation, form)
