"""The finished model gets a manifest as well, so that `cpt verify RUN` covers it."""

from pathlib import Path

from transformers import Trainer

from cpt.checkpoints.manifest import MANIFEST, make_durable, write_manifest
from cpt.checkpoints.transaction import hash_all
from cpt.ranks import is_main_process
from cpt.stages.checkpointing.saving import TransactionalSaves

WRITTEN_LATER_TOO = (".md", ".html")  # the card, and the verdict's page


def seal_export(trainer: Trainer, folder: Path) -> None:
    """Write the manifest of an export that is complete, by the process that wrote it; when it returns, the disk has
    all of it."""
    if is_main_process() and isinstance(trainer, TransactionalSaves):
        files = {
            name: entry for name, entry in sorted(hash_all(folder).items()) if not name.endswith(WRITTEN_LATER_TOO)
        }
        files.pop(MANIFEST, None)
        for inside in [path for path in folder.rglob("*") if path.is_dir()]:
            make_durable(inside)
        write_manifest(folder, trainer.describe("weights", trainer.state.global_step, trainer.rows_trained, files))
