"""The models of a run: the one that its stage trains, and the one that it is compared with."""

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from cpt.data.forms import form_of
from cpt.models.build import build_model
from cpt.recipe.schema import Recipe
from cpt.stages.arguments import weights_dtype
from cpt.stages.find import find_stage

PACKED = ("document", "conversation")
"""Forms of data whose rows hold several documents."""


def model_for(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments) -> nn.Module:
    """The recipe's model as its stage trains it, in the types that the arguments ask for.

    Raises:
        CptError: one of its children; see `build_model`.
    """
    own = vars(find_stage(recipe.stage)).get("model_for")  # a stage whose model is no language model says how it is made
    return own(recipe, tokenizer, arguments) if own is not None else language_model(recipe, tokenizer, arguments)


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


def reference_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments) -> nn.Module | None:
    """The model that the run starts from, frozen; None with an adapter, without which the trained model is that one.

    It is made from the recipe, and not from the trained model, so that a run that goes on has the same reference.
    """
    if recipe.model.lora is not None:
        return None
    model = language_model(recipe, tokenizer, arguments)
    return model.requires_grad_(False).eval()
