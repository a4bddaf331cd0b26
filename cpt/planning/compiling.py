"""Whether a run compiles its layers: what `training.torch_compile: auto`, the default, means."""

from typing import Any

from transformers import PreTrainedModel

from cpt.data.readers.forms import form_of_stage
from cpt.models.compiled import (
    UNDER_FSDP,
    UNDER_ZERO3,
    UNEVEN,
    decoder_layers,
    has_experts,
    recomputes_under_fsdp,
    wanted_compiling,
)
from cpt.models.inventory import runs_along_the_row
from cpt.models.recomputing import SWITCHES
from cpt.parallelism import read_parallelism
from cpt.planning.stage_terms import KINDS, MASKED_FORMS
from cpt.recipe.keys import AUTO, COMPILING
from cpt.recipe.schema import Recipe

FEWEST_STEPS = 100  # compiling takes 20 to 60 seconds, which fewer steps do not win back


def compiles(recipe: Recipe, *, zero3: bool, on_cpu: bool, model: PreTrainedModel | None = None) -> tuple[bool, str]:
    """Whether the decoder layers are compiled, and the reason.

    Args:
        model: without weights; by default a plain transformer.
    """
    training = recipe.training
    if wanted_compiling(training) is not None:
        return True, "the recipe asks for it"
    if training.get(COMPILING, AUTO) != AUTO:
        return False, "the recipe switches it off"
    checkpoints: dict[str, Any] = next((given for name in SWITCHES if (given := training.get(f"{name}_kwargs"))), {})
    reasons = {
        "it is for GPUs": on_cpu,
        UNEVEN: not has_even_batches(recipe),
        UNDER_ZERO3: zero3,
        UNDER_FSDP: recomputes_under_fsdp(training),
        "processes share rows": read_parallelism(training).sharing_rows > 1,
        f"the run has fewer than {FEWEST_STEPS} steps": is_short(recipe),
        "it has not been tried with weights in 4 bit": bool((recipe.model.lora or {}).get("quantize")),
        "it has not been tried with a model's own code": recipe.model.trust_remote_code,
        "checkpoints are of torch's older kind (`use_reentrant`)": bool(checkpoints.get("use_reentrant")),
        **({} if model is None else reasons_of(model, selective=bool(checkpoints.get("selective")))),
    }
    why_not = next((reason for reason, applies in reasons.items() if applies), None)
    return why_not is None, why_not or "the run is on a GPU"


def has_even_batches(recipe: Recipe) -> bool:
    """Whether all micro-batches have one shape: rows of `sequence_length` tokens, and no completions."""
    writes = recipe.stage in KINDS and KINDS[recipe.stage].written is not None
    return recipe.data.packing != "token_budget" and form_of_stage(recipe.stage) not in MASKED_FORMS and not writes


def reasons_of(model: PreTrainedModel, *, selective: bool) -> dict[str, bool]:
    return {
        f"transformers marks no decoder layers in {type(model).__name__}": not decoder_layers(model),
        "the model has recurrent layers": runs_along_the_row(model),
        "`selective` cannot look into compiled parts of layers with experts": selective and has_experts(model),
    }


def is_short(recipe: Recipe) -> bool:
    """Whether the recipe gives the run fewer than 100 steps."""
    tokens, each_step = recipe.budget.tokens, recipe.budget.global_batch_tokens
    return tokens is not None and each_step is not None and tokens < FEWEST_STEPS * each_step
