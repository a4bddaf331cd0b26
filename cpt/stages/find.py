"""Find a stage by its name in the recipe: its config class, its columns and its trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

from transformers import Trainer

from cpt.errors import RecipeError, ResourceError
from cpt.extend import did_you_mean, import_user_module
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.stage_columns import BUILT_IN_COLUMNS

LANGUAGE_MODEL = ("cpt.stages.trainer:CPTTrainer",)
TRAINERS: dict[str, tuple[str, ...]] = {
    "pretrain": LANGUAGE_MODEL,
    "cpt": LANGUAGE_MODEL,
    "sft": LANGUAGE_MODEL,
    "dpo": ("cpt.stages.examples:ExampleTrainer", "trl:DPOTrainer"),  # arXiv 2305.18290, and others by `loss_type`
    "kto": ("cpt.stages.preferences:JudgedAnswers", "trl:KTOTrainer"),  # arXiv 2402.01306
    "orpo": ("cpt.stages.preferences:WithoutReference", "trl.experimental.orpo:ORPOTrainer"),  # arXiv 2403.07691
    "cpo": ("cpt.stages.preferences:WithoutReference", "trl.experimental.cpo:CPOTrainer"),  # arXiv 2401.08417, SimPO
    "reward": ("cpt.stages.preferences:WholeDialogues", "trl:RewardTrainer"),  # Bradley-Terry
    "grpo": ("cpt.stages.sampling.generation_batches:Groups", "trl:GRPOTrainer"),  # arXiv 2402.03300
    "rloo": ("cpt.stages.sampling.generation_batches:GenerationBatches", "trl:RLOOTrainer"),  # arXiv 2402.14740
    "ppo": ("cpt.stages.ppo:PPOTrainer",),
    "spo": ("cpt.stages.spo:SPOTrainer",),
    "distill": ("cpt.stages.distill:DistillTrainer",),
    "distill_text": ("cpt.stages.distill:DistillTrainer",),
    "distill_on_policy": ("cpt.stages.sampling.generation_batches:StepsOfPrompts", "trl:DistillationTrainer"),
    "gkd": ("cpt.stages.distill:WholeConversations", "trl.experimental.gkd:GKDTrainer"),
}
"""Our trainer; or what a trainer of TRL's needs to train on our rows, and that trainer: its loss, metrics and
generation stay."""
PARTS = ("CONFIG", "COLUMNS", "build_trainer")


@dataclass(frozen=True)
class Stage:
    """A stage, built in or the user's."""

    CONFIG: Any
    COLUMNS: tuple[str, ...]
    trainer: Callable[..., Trainer] | None = None
    """Of a built-in stage."""
    build_trainer: Callable[..., Trainer] | None = None
    """Of a user's."""


def find_stage(name: str) -> Stage:
    """The stage: a built-in one, or the user's `package.module`.

    Raises:
        RecipeError: there is none, or it lacks one of CONFIG, COLUMNS, build_trainer.
        ResourceError: TRL has no such trainer in the installed version.
    """
    if name in TRAINERS:
        return built_in(name)
    if "." not in name:
        raise RecipeError(
            f"`stage`: no stage called `{name}`.{did_you_mean(name, TRAINERS)} Built in: {', '.join(TRAINERS)}. Your"
            " own: `package.module`."
        )
    module = import_user_module(name)
    missing = [part for part in PARTS if part not in vars(module)]
    if missing:
        raise RecipeError(
            f"`stage`: `{name}` lacks {', '.join(missing)}. A stage is a module with {', '.join(PARTS)}."
        )
    return Stage(module.CONFIG, tuple(module.COLUMNS), build_trainer=module.build_trainer)


@cache
def built_in(name: str) -> Stage:
    try:
        config, *bases = map(load, (STAGE_CONFIGS[name], *TRAINERS[name]))
    except (ImportError, AttributeError) as problem:
        if "trl" not in f"{problem.name} {problem}":
            raise
        raise ResourceError(
            f"`stage`: `{name}` needs a trainer that the installed trl {version('trl')} does not have ({problem})."
            " Install one that has it: pip install 'trl==1.16.*'"
        ) from problem
    trainer = bases[0] if len(bases) == 1 else type(bases[1].__name__, tuple(bases), {})
    return Stage(config, BUILT_IN_COLUMNS[name], trainer)


def load(name: str) -> Any:
    """The class `package.module:Class`."""
    module, _, found = name.partition(":")
    return getattr(import_module(module), found)
