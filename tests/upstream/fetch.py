"""Fetch transformers' own common model tests, of the installed version, into build/upstream: `make test-upstream`.

They come from the source distribution on the package index. It has `test_modeling_common.py`, and not the testers of
generation and of exports beside it, which are in the repository alone. A checkout of it at the same version has all:
`make test-upstream CHECKOUT=FOLDER`.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

UPSTREAM = Path(__file__).parents[2] / "build" / "upstream"
PACKAGE = "transformers_tests"  # `tests` is the name of ours


def main(checkout: str) -> None:
    shutil.rmtree(UPSTREAM, ignore_errors=True)
    UPSTREAM.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "install", "--target", str(UPSTREAM / "packages"), "parameterized"], check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(checkout) / "tests" if checkout else unpacked_tests(pip, Path(folder))
        shutil.copytree(tests, UPSTREAM / PACKAGE)


def unpacked_tests(pip: list[str], folder: Path) -> Path:
    name = f"transformers=={version('transformers')}"
    source = [
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        "--dest",
        str(folder),
        name,
    ]
    subprocess.run([*pip, *source], check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
