"""The finished model gets a manifest as well, so that `cpt verify RUN` covers it."""

from pathlib import Path

from transformers import Trainer

from cpt.checkpoints.manifest import MANIFEST, hash_files, write_manifest
from cpt.ranks import is_main_process
from cpt.stages.saving import TransactionalSaves

WRITTEN_LATER_TOO = (".md", ".html")  # the card, and the verdict's page


def seal_export(trainer: Trainer, folder: Path) -> None:
    """Write the manifest of an export, by the process that wrote the export."""
    if is_main_process() and isinstance(trainer, TransactionalSaves):
        files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in WRITTEN_LATER_TOO)
        names = [name for path in files if (name := path.relative_to(folder).as_posix()) != MANIFEST]
        write_manifest(folder, trainer.describe("weights", trainer.state.global_step, trainer.rows_trained, hash_files(folder, names)))
