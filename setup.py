"""What pyproject.toml cannot say: recipes, DeepSpeed profiles and launch files, which a clone has at its top, go into
the wheel."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "deepspeed_configs", "launch")  # cpt/files.py finds them
OF_RUNS = ignore_patterns("__pycache__", "*.log", "*.pid", "collectives_of_rank_*")


class BuildWithRecipes(build_py):
    """Copies them to cpt/shipped/; an editable install has the repository itself."""

    def run(self) -> None:
        """Build as always, then copy."""
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                copytree(
                    name,
                    Path(self.build_lib, "cpt", "shipped", name),
                    ignore=OF_RUNS,
                    dirs_exist_ok=True,
                )


setup(cmdclass={"build_py": BuildWithRecipes})
