"""The ways in which a run's processes share the model, as checkpoints know them."""

from cpt.checkpoints.fsdp_parts import parts_in
from cpt.checkpoints.manifest import Manifest

PLAIN, FSDP = "plain", "fsdp"
ZERO = "zero-"


def way_of(manifest: Manifest) -> str:
    """How the processes that wrote it shared the model: `plain`, `fsdp`, or `zero-` and DeepSpeed's stage."""
    if manifest.zero_stage is not None:
        return zero_way(manifest.zero_stage)
    return FSDP if parts_in(manifest.files) else PLAIN


def zero_way(stage: int) -> str:
    """Of DeepSpeed's stage."""
    return f"{ZERO}{stage}"


def is_zero(way: str) -> bool:
    """Whether DeepSpeed's engine trains so."""
    return way.startswith(ZERO)


def in_words(way: str) -> str:
    """For people."""
    names = {PLAIN: "no sharding (one process or DDP)", FSDP: "FSDP2"}
    return names.get(way, f"DeepSpeed's ZeRO-{way.removeprefix(ZERO)}")
