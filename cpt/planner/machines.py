"""How many machines with how many GPUs are meant, by what a user wrote."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import Gpu
from cpt.parallelism import groups_of_rows
from cpt.recipe.schema import Recipe


@dataclass(frozen=True)
class Machines:
    """Alike, each with as many GPUs of one kind."""

    gpu: str
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Of all."""
        return self.nodes * self.gpus_per_node


def machines_that_are_meant(
    gpu: str | None,
    gpus: int | None,
    nodes: int,
    gpus_per_node: int | None,
    found: Sequence[Gpu],
    links: str | None = None,
) -> Machines:
    """What was named, and for the rest what is here.

    Args:
        gpus: of all machines together.
        found: the GPUs of this machine.
        links: as they were written.

    Raises:
        ResourceError: no GPU was named and there is none, or the numbers contradict each other.
    """
    if gpu is None and not found:
        raise ResourceError('this machine has no GPU: say which one is meant, --gpu "RTX 4090", or --gpu cpu.')
    name = gpu if gpu is not None else found[0].name
    if name.strip().lower() == "cpu" and (nodes > 1 or links is not None):
        raise ResourceError(
            "--gpu cpu: processes on the CPUs of several machines are not planned. Leave out --nodes and --links."
        )
    if gpus is not None and gpus_per_node is not None and gpus != nodes * gpus_per_node:
        raise ResourceError(
            f"--gpus {gpus} contradicts --nodes {nodes} x --gpus-per-node {gpus_per_node} = {nodes * gpus_per_node}. "
            "--gpus counts those of all machines; leave it out."
        )
    if gpus_per_node is not None:
        return Machines(name, nodes, gpus_per_node)
    if gpus is not None:
        if gpus % nodes:
            raise ResourceError(
                f"--gpus {gpus} are not the same number in each of --nodes {nodes}. Write --gpus-per-node."
            )
        return Machines(name, nodes, gpus // nodes)
    if gpu is not None and nodes > 1:
        raise ResourceError(f"--nodes {nodes}: say how many GPUs each machine has, such as --gpus-per-node 8.")
    return Machines(name, nodes, 1 if gpu is not None else len(found))


def refuse_too_many(recipe: Recipe, machines: Machines) -> None:
    """Each process needs a row of each step, or each group of those that share rows.

    Raises:
        RecipeError: a step has fewer rows than that.
    """
    tokens, length = recipe.budget.global_batch_tokens, recipe.data.sequence_length
    readers = groups_of_rows(recipe.training, machines.gpus)
    if tokens is not None and tokens // length < readers:
        raise RecipeError(
            f"`budget.global_batch_tokens` is {tokens:,}: {tokens // length} rows of {length:,} tokens, fewer than the"
            f" {readers} that {machines.nodes} x {machines.gpus_per_node} GPUs take at once. Take fewer GPUs, shorter"
            f" rows, or steps of {readers * length:,} tokens."
        )
