"""`python -m benchmarks.gpu.carried [FOLDER]`: which packages a machine with the GPU image lacks, and which wheels of
FOLDER it does not have yet.

image.txt lists the packages of an image of a cloud with Python 3.12, torch 2.11 and transformers 5.17; wheels.txt what
wheels.sh collects. transformers is in both: users install the newest one.
"""

import argparse
import ast
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_string
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
"""The image's."""


def read_names(file: str) -> set[str]:
    return {
        canonicalize_name(name) for name in (ROOT / "benchmarks" / "gpu" / file).read_text().split()
    }


def requirements_of_project() -> tuple[list[Requirement], list[Requirement]]:
    """pyproject.toml's dependencies, and those of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    optional = [
        Requirement(line) for lines in project["optional-dependencies"].values() for line in lines
    ]
    return needed, optional


def requirement_to_download(name: str) -> str:
    """The newest version that pyproject.toml allows."""
    for requirement in (*requirements_of_project()[0], *requirements_of_project()[1]):
        if canonicalize_name(requirement.name) == name:
            return f"{name}{requirement.specifier}"
    return name


def imported_modules() -> set[str]:
    """Of other packages, by all modules of cpt, lazily too."""
    modules: set[str] = set()
    for path in (ROOT / "cpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules.add(node.module.split(".")[0])
    return modules - set(sys.stdlib_module_names) - {"cpt"}


def packages_needed() -> set[str]:
    """Of cpt's imports, and what the packages among the wheels require here; what only an extra installs is not
    needed, nor what that requires."""
    needed, optional = requirements_of_project()
    extras = {canonicalize_name(requirement.name) for requirement in optional}
    extras.update(
        name for extra in tuple(extras) for name in required_by(installed_requirements(extra))
    )
    extras -= {canonicalize_name(requirement.name) for requirement in needed}
    distributions = metadata.packages_distributions()
    names = {
        canonicalize_name(name)
        for module in imported_modules()
        for name in distributions.get(module, ())
    }
    names -= extras
    names |= {canonicalize_name(requirement.name) for requirement in needed}
    for wheel in read_names("wheels.txt"):
        names |= set(required_by(installed_requirements(wheel)))
    return names


def installed_requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # an extra that is not installed here
        return []


def required_by(lines: Iterable[str]) -> Iterator[str]:
    """Names of the packages that lines of Requires-Dist ask for on the image."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(PYTHON):
            yield canonicalize_name(requirement.name)


def missing_packages() -> set[str]:
    """What cpt needs, and neither the image nor wheels.txt has."""
    return packages_needed() - read_names("image.txt") - read_names("wheels.txt")


def missing_for_wheels(folder: Path) -> set[str]:
    """What the wheels of a folder require, and neither the folder nor the image has; and wheels that are not there."""
    names: set[str] = set()
    required: set[str] = set()
    for path in folder.glob("*.whl"):
        names.add(canonicalize_name(path.name.split("-")[0]))
        with zipfile.ZipFile(path) as wheel:
            description = next(
                name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")
            )
            fields = message_from_string(wheel.read(description).decode())
        required |= set(required_by(fields.get_all("Requires-Dist") or []))
    return (
        (required | read_names("wheels.txt"))
        - names
        - (read_names("image.txt") - read_names("wheels.txt"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.carried", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of wheels")
    parser.add_argument(
        "--download", action="store_true", help="print what to download, one line each"
    )
    options = parser.parse_args()
    if options.download:
        print("\n".join(requirement_to_download(name) for name in sorted(read_names("wheels.txt"))))
        return
    missing = missing_packages() if options.folder is None else missing_for_wheels(options.folder)
    if missing:
        raise SystemExit(
            f"missing on the GPU machine: {', '.join(sorted(missing))}. Add them to wheels.txt."
        )


if __name__ == "__main__":
    main()
