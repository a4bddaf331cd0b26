"""What contradicts a launch, found before a file of it is written."""

from collections.abc import Callable
from typing import Any

from cpt.errors import LaunchError
from cpt.launchers.launch import Launch
from cpt.parallelism import read_parallelism
from cpt.recipe.automatic import AUTO, MICRO_BATCH
from cpt.stages.deepspeed_profile import DEFAULT_MICRO_BATCH, read_profile


def refuse_contradictions(launch: Launch) -> None:
    """All checks.

    Raises:
        LaunchError: the engine does not fit the recipe, or the number of processes does not.
        RecipeError: the DeepSpeed profile cannot be read.
    """
    for check in CHECKS:
        check(launch)


def engine_fits_the_split(launch: Launch) -> None:
    """DeepSpeed's launcher is for its own way to split a model."""
    training = launch.recipe.training
    if launch.engine != "deepspeed":
        return
    if training.get("fsdp"):
        raise LaunchError(
            "the recipe splits the model by FSDP (`training.fsdp`), which DeepSpeed's launcher knows nothing of. "
            "Start it --launcher torchrun or --launcher accelerate, or name a DeepSpeed profile in place of `fsdp`."
        )
    if not launch.uses_deepspeed:
        raise LaunchError(
            "--launcher deepspeed, but the recipe names no DeepSpeed profile: each process would hold the whole model"
            " (DDP). Add `training.deepspeed=deepspeed_configs/ds_config_production.json`, or start it --launcher"
            " torchrun."
        )


def precision_is_one(launch: Launch) -> None:
    """A profile that turns a precision on or off must agree with the recipe."""
    if not launch.uses_deepspeed:
        return
    given = launch.recipe.training["deepspeed"]
    profile = read_profile(given)
    for name in ("bf16", "fp16"):
        section: Any = profile.get(name, {})
        in_profile = section.get("enabled", False) if isinstance(section, dict) else section
        in_recipe = bool(launch.recipe.training.get(name, False))
        if in_profile != AUTO and in_profile != in_recipe and name in profile:
            raise LaunchError(
                f"the DeepSpeed profile says `{name}.enabled: {str(in_profile).lower()}`, the recipe"
                f" `training.{name}: "
                f'{str(in_recipe).lower()}`. Write `"enabled": "auto"` into the profile: then the recipe decides.'
            )


def groups_fit_the_processes(launch: Launch) -> None:
    """Processes that share rows are as many as the recipe says, in each group."""
    together = read_parallelism(launch.recipe.training).sharing_rows
    if launch.processes % together:
        raise LaunchError(
            f"`training.parallelism_config` puts {together} processes together, which does not divide {launch.nodes}"
            f" node(s) x {launch.gpus_per_node} GPUs = {launch.processes} processes. Make one a multiple of the other."
        )


def batch_fits_the_processes(launch: Launch) -> None:
    """The global batch divides into micro-batches over all processes."""
    tokens, micro_batch = (
        launch.recipe.budget.global_batch_tokens,
        launch.recipe.training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH),
    )
    if tokens is None or micro_batch == AUTO:
        return
    length, together = launch.recipe.data.sequence_length, read_parallelism(launch.recipe.training).sharing_rows

    def tokens_at_once(nodes: int) -> int:
        return nodes * launch.gpus_per_node * int(micro_batch) * length // together

    if tokens % tokens_at_once(launch.nodes):
        fitting = [
            str(nodes)
            for nodes in range(1, 2 * launch.nodes + 1)
            if (once := tokens_at_once(nodes)) and tokens % once == 0
        ]
        raise LaunchError(
            f"`budget.global_batch_tokens` is {tokens:,}, which does not divide into {launch.nodes} node(s) x"
            f" {launch.gpus_per_node} GPUs x {MICRO_BATCH} {micro_batch} x sequence_length"
            f" {length:,}{f' / {together} processes together' if together > 1 else ''} ="
            f" {tokens_at_once(launch.nodes):,} tokens. Make it a multiple of that, or change the"
            f" nodes{': ' + ', '.join(fitting) + ' would fit' if fitting else ''}."
        )


CHECKS: tuple[Callable[[Launch], None], ...] = (
    engine_fits_the_split,
    precision_is_one,
    groups_fit_the_processes,
    batch_fits_the_processes,
)
