"""The models of a run: the one that its stage trains, and the one that it is compared with."""

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from cpt.data.readers.forms import form_of
from cpt.errors import RecipeError
from cpt.models.adapters import START_IN_THE_BASE
from cpt.models.build import build_model
from cpt.models.scoring import scoring_model
from cpt.recipe.rules import REWARDED
from cpt.recipe.schema import Recipe
from cpt.training.arguments import weights_dtype
from cpt.training.find_stage import find_stage

PACKED = ("document", "conversation")
"""Forms of data whose rows hold several documents."""
REFERENCED = ("dpo", "kto")
"""Stages that always need a reference; those with rewards have one where `training.beta` is not 0."""


def model_for(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments) -> nn.Module:
    """The recipe's model as its stage trains it, in the types that the arguments ask for.

    Raises:
        CptError: one of its children; see `build_model`.
    """
    if recipe.stage == "reward":  # a new head for one score in place of the language model's
        return scoring_model(recipe.model, tokenizer, seed=recipe.seed, dtype=weights_dtype(recipe, arguments))
    return language_model(recipe, tokenizer, arguments)


def language_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments) -> nn.Module:
    """The recipe's model, as it is before the first step."""
    return build_model(
        recipe.model,
        tokenizer,
        seed=recipe.seed,
        dtype=weights_dtype(recipe, arguments),
        mixed_precision=arguments.bf16 or arguments.fp16,
        packed=is_packed(recipe),
    )


def is_packed(recipe: Recipe) -> bool:
    """Whether rows hold several documents, which positions alone keep apart."""
    return recipe.data.packing != "token_budget" and form_of(find_stage(recipe.stage).COLUMNS) in PACKED


def reference_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments
) -> nn.Module | None:
    """The model that the run starts from, frozen; None with an adapter, without which the trained model is that one.

    It is made from the recipe, and not from the trained model, so that a run that goes on has the same reference.

    Raises:
        RecipeError: see `check_reference`.
    """
    if recipe.model.lora is not None:
        check_reference(recipe)
        return None
    model = language_model(recipe, tokenizer, arguments)
    return model.requires_grad_(False).eval()


def check_reference(recipe: Recipe) -> None:
    """Refuse adapters without which the model is not the one that the run starts from, where the stage compares the
    two.

    Raises:
        RecipeError: the adapter's start is taken out of the weights under it.
    """
    start = str((recipe.model.lora or {}).get("init_lora_weights")).partition("_niter")[0]
    if start in START_IN_THE_BASE and has_reference(recipe):
        raise RecipeError(
            f"`model.lora.init_lora_weights: {start}` takes the adapter out of the base's weights: without it they are"
            f" no reference for stage `{recipe.stage}`. Remove it."
        )


def has_reference(recipe: Recipe) -> bool:
    """Whether the stage compares the model with the one that the run starts from."""
    if recipe.stage not in (*REFERENCED, *REWARDED):
        return False
    fields: Any = vars(find_stage(recipe.stage).CONFIG)["__dataclass_fields__"]
    return recipe.stage in REFERENCED or bool(recipe.training.get("beta", fields["beta"].default))
