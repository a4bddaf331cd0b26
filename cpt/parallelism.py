"""What `training.parallelism_config` asks for: how many processes share a row, and so how many read rows of their
own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpt.errors import RecipeError
from cpt.plugins import did_you_mean

KEY = "parallelism_config"
SIZES = ("sp_size", "tp_size", "cp_size", "dp_replicate_size", "dp_shard_size")
BACKENDS = ("sp_backend", "cp_backend")
PIPELINE = (
    "pipeline parallelism: Hugging Face's Trainer has no schedule for stages of layers. Split the model with ZeRO-3 or"
    " FSDP2 instead, and rows with `sp_size`; a model that needs stages is exported in Hugging Face's format (`cpt"
    " export`), trained with Megatron-LM, NeMo or torchtitan, and brought back in the same format"
)


@dataclass(frozen=True)
class Parallelism:
    """Sizes of groups of processes; 1 where nothing is split that way."""

    sp_size: int = 1
    """Processes that share each row, a part of its tokens on each (DeepSpeed Ulysses)."""
    tp_size: int = 1
    """Processes that share each layer's matrices."""
    cp_size: int = 1
    """Processes that share each row by torch's context parallelism."""
    dp_replicate_size: int = 1
    """Copies of a model that FSDP2 splits within each copy."""
    dp_shard_size: int = 1
    """Processes over which FSDP2 splits a copy."""

    @property
    def sharing_rows(self) -> int:
        return self.sp_size * self.tp_size * self.cp_size


def read_parallelism(training: Mapping[str, Any]) -> Parallelism:
    """The sizes that the recipe's section `training` asks for.

    Raises:
        RecipeError: an unknown key, or a size that is not one.
    """
    given = training.get(KEY)
    if given is None:
        return Parallelism()
    if not isinstance(given, Mapping):
        raise RecipeError(f"`training.{KEY}` is {given!r}; write keys and values, such as {{sp_size: 2}}.")
    for key, value in given.items():
        where = f"`training.{KEY}.{key}`"
        if key.startswith("pp_"):
            raise RecipeError(f"{where}: {PIPELINE}.")
        if key not in (*SIZES, *BACKENDS):
            known = (*SIZES, *BACKENDS)
            raise RecipeError(f"{where} is not a key of it.{did_you_mean(key, known)} It has: {', '.join(known)}.")
        if key in SIZES and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise RecipeError(f"{where} is {value!r}; it must be a whole number of processes, 1 or more.")
    return Parallelism(**{key: value for key, value in given.items() if key in SIZES})


def groups_of_rows(training: Mapping[str, Any], processes: int) -> int:
    """How many groups of processes read rows of their own: all processes, where nothing but the model is split.

    Raises:
        RecipeError: see `read_parallelism`; or the processes cannot be divided so.
    """
    sharing = read_parallelism(training).sharing_rows
    groups, rest = divmod(processes, sharing)
    if rest or not groups:
        raise RecipeError(
            f"`training.{KEY}` lets {sharing} processes share each row, and the run has {processes}: start a multiple"
            f" of {sharing} processes, or make its sizes smaller."
        )
    return groups
