"""Where the recipes, DeepSpeed profiles and launch files are that come with cpt: in the repository, or inside an
installed package."""

from pathlib import Path


def folder_of_shipped_files() -> Path:
    """The folder of `recipes/`, `deepspeed_configs/` and `launch/`: setup.py puts them into the wheel, a clone has
    them at its top."""
    package = Path(__file__).resolve().parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


SHIPPED_FILES = folder_of_shipped_files()


def training_program() -> str:
    """The words that stand for `cpt train` behind `accelerate launch` or `torchrun`, from the current folder."""
    return "cpt/train.py" if Path("cpt/train.py").is_file() else "-m cpt.train"
