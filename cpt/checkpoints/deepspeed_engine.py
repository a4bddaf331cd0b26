"""Make DeepSpeed assemble its state, in step with the other processes, without writing it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from cpt.checkpoints.model_folder import load_data
from cpt.deepspeed_internals import without_recovery_script

LATEST = "latest"


class CapturingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Captures what DeepSpeed would write, by path relative to `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name = "CapturingCheckpointEngine"
        self.folder = folder
        self.states: dict[str, Any] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self.states[Path(os.path.relpath(path, self.folder)).as_posix()] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_data(Path(path), map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


@contextmanager
def capture_states(engine: Any, folder: Path) -> Iterator[CapturingCheckpointEngine]:
    """Inside, `engine.save_checkpoint(folder, save_latest=False)` runs all collective operations, but writes no file.

    Args:
        engine: a DeepSpeed engine.
        folder: the folder that it would write to, which does not have to exist.
    """
    captured, before = CapturingCheckpointEngine(folder), engine.checkpoint_engine
    engine.checkpoint_engine = captured
    try:
        with without_recovery_script(engine):
            yield captured
    finally:
        engine.checkpoint_engine = before


def tag_of(engine: Any) -> str:
    """DeepSpeed's name for its state at this step."""
    return f"global_step{engine.global_steps}"
