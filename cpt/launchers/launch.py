"""What `cpt launch` starts: a recipe on some processes of some nodes, from a folder that holds the files for it."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from cpt.launchers.attempts import TRAIN
from cpt.recipe.schema import Recipe


@dataclass(frozen=True)
class Launch:
    """One way to start a recipe."""

    recipe: Recipe
    file: Path
    overrides: tuple[str, ...]
    lora: bool
    engine: str
    """accelerate, torchrun, deepspeed or slurm."""
    nodes: int
    gpus_per_node: int
    hosts: tuple[str, ...]
    """Names of the nodes in the order of their ranks; empty where there is one node, or SLURM chooses them."""
    port: int
    folder: Path
    """Takes the files."""
    venv: Path
    """The virtual environment on the nodes."""
    work: Path
    """The folder that the recipe's paths are relative to, the same on all nodes."""
    hostfile: str = ""
    """What the user's own hostfile says, with its comments and spare hosts."""
    interface: str | None = None
    """Network interface between the nodes; by default each node finds its own."""
    sbatch: tuple[str, ...] = ()
    """Further options of a SLURM job, such as `--partition=gpu`."""

    @property
    def on_cpu(self) -> bool:
        """The recipe trains without GPUs."""
        return bool(self.recipe.training.get("use_cpu"))

    @property
    def processes(self) -> int:
        """Of all nodes together."""
        return self.nodes * self.gpus_per_node

    @property
    def uses_deepspeed(self) -> bool:
        """The recipe names a DeepSpeed profile."""
        return bool(self.recipe.training.get("deepspeed"))

    @property
    def run_folder(self) -> str:
        """Where the run writes its status, as the scripts name it."""
        return self.shown(self.recipe.output_dir / self.recipe.name)

    def shown(self, path: Path) -> str:
        """A path as the scripts write it: relative to the work folder where it lies below."""
        whole = path if path.is_absolute() else self.work / path
        return shlex.quote(str(whole.relative_to(self.work)) if whole.is_relative_to(self.work) else str(whole))

    def train_words(self) -> str:
        """`cpt/train.py RECIPE ...`, quoted for a shell."""
        return " ".join([self.shown(TRAIN), self.recipe_words()])

    def recipe_words(self) -> str:
        """The recipe with all that was written behind it, quoted for a shell."""
        return " ".join([self.compared_words(), *(["--lora"] if self.lora else [])])

    def compared_words(self) -> str:
        """The recipe with its overrides alone, which is what the check of the cluster compares."""
        return " ".join([self.shown(self.file), *map(shlex.quote, self.overrides)])

    def way_back(self) -> str:
        """From a script in the folder to the work folder, as bash reads it between double quotes."""
        return f'$(dirname -- "${{BASH_SOURCE[0]}}")/{os.path.relpath(self.work, self.folder)}'
