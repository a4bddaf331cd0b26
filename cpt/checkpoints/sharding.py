"""How the processes that write a checkpoint share the model: not at all, by FSDP2, or by DeepSpeed's ZeRO."""

from pathlib import Path

from cpt.checkpoints.fsdp_parts import FOLDER, parts_in
from cpt.checkpoints.manifest import MANIFEST, Manifest, read_manifest

PLAIN, FSDP = "plain", "fsdp"
ZERO = "zero-"  # and the stage; alone where another program wrote the checkpoint


def sharding_of(manifest: Manifest) -> str:
    """`plain`, `fsdp`, or `zero-` and DeepSpeed's stage."""
    if manifest.zero_stage is not None:
        return f"{ZERO}{manifest.zero_stage}"
    return FSDP if parts_in(manifest.files) else PLAIN


def sharding_in(checkpoint: Path) -> str:
    """The same by the checkpoint's files, where it has no manifest."""
    if (checkpoint / MANIFEST).exists():
        return sharding_of(read_manifest(checkpoint))
    if (checkpoint / FOLDER).is_dir():
        return FSDP
    return ZERO if (checkpoint / "latest").exists() else PLAIN


def is_zero(sharding: str) -> bool:
    return sharding.startswith(ZERO)


def name_sharding(sharding: str) -> str:
    """`DeepSpeed ZeRO-2`, for messages."""
    names = {PLAIN: "no sharding (one process or DDP)", FSDP: "FSDP2", ZERO: "DeepSpeed ZeRO"}
    return names.get(sharding, f"DeepSpeed ZeRO-{sharding.removeprefix(ZERO)}")
