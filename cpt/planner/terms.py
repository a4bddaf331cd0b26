"""Parts of a memory and their sums; bytes of an optimizer."""

from dataclasses import dataclass

from cpt.planner.setup import Setup

GIB = 2**30
MOMENTS = {
    "adamw": 2,
    "sgd": 0,
}  # for each number that is trained, in its own type; unknown optimizers count like AdamW
MASTER = 4


@dataclass(frozen=True)
class Term:
    """One part of the memory."""

    name: str
    size: float
    """Bytes."""
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """All that is there at once."""

    name: str
    terms: tuple[Term, ...]

    @property
    def size(self) -> float:
        """Bytes."""
        return sum(term.size for term in self.terms)


def moment_bytes(setup: Setup) -> int:
    """The optimizer's own, for each number that is trained: of adapters and under DeepSpeed that number is in fp32."""
    each = setup.weights_bytes if setup.zero is None and setup.lora is None else 4
    return each * MOMENTS.get(setup.optimizer, MOMENTS["adamw"])
