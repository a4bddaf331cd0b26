"""Write the Dockerfiles, their requirements and the tables of docs/installing.md from cpt/versions.py: `python -m
docker.write`."""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.marked import with_part
from cpt.versions import CUDAS, FOR_ANY_LINE, GPUS, LINES, SOURCES, STACK, TORCH_OF_PYPI, Line

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "installing.md"
PYTHON_OF_UBUNTU = "3.12"  # of 24.04, the base of NVIDIA's images
WRITTEN = "written by `python -m docker.write` from cpt/versions.py"
MARKS = "<!-- python -m docker.write, {part}: begin -->\n", "<!-- python -m docker.write, {part}: end -->"

DOCKERFILE = """\
# syntax=docker/dockerfile:1
# cpt with torch {torch} for {kind}; {written}.
#   docker build --file docker/{name}.Dockerfile --tag cpt:{name} .
#   docker run --rm {gpus}--shm-size=8g --volume "$PWD:/work" cpt:{name} doctor
FROM {image}

# DeepSpeed compiles its optimizers at their first use{toolkit}. Of these packages the distribution keeps one version.
# hadolint ignore=DL3008
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends {packages} \\
    && rm --recursive /var/lib/apt/lists/*

ENV PATH=/opt/cpt/bin:$PATH
RUN python3 -m venv /opt/cpt

# What seldom changes comes first: a new version of cpt costs the last layers only.
COPY docker/{name}.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/pip \\
    pip install --requirement /opt/requirements/{name}.txt
{kernels}
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE /opt/source/
COPY cpt /opt/source/cpt
COPY recipes /opt/source/recipes
COPY deepspeed_configs /opt/source/deepspeed_configs
COPY launch /opt/source/launch
RUN pip install --no-cache-dir --no-deps /opt/source

RUN useradd --create-home --uid 1001 cpt && mkdir /work && chown cpt /work
USER 1001
WORKDIR /work
ENTRYPOINT ["cpt"]
CMD ["--help"]
"""
KERNELS = """\

# Built by others than the projects themselves (docs/installing.md): `--build-arg KERNELS=` leaves them out.
ARG KERNELS=yes
COPY docker/{name}-kernels.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/pip \\
    if [ -n "$KERNELS" ]; then pip install --requirement /opt/requirements/{name}-kernels.txt; fi
"""


def main() -> None:
    """Write all of it."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def files() -> dict[Path, str]:
    """What belongs into docker/ beside this file."""
    written = {}
    for line in LINES:
        written[ROOT / "docker" / f"{line.name}.Dockerfile"] = dockerfile(line)
        written[ROOT / "docker" / f"{line.name}.txt"] = "".join(f"{one}\n" for one in requirements(line))
        if line.wheels:
            written[ROOT / "docker" / f"{line.name}-kernels.txt"] = "".join(f"{one}\n" for one in kernels(line))
    return written


def dockerfile(line: Line) -> str:
    """The image of one line: NVIDIA's with the compiler of this CUDA, or Python's own, with the Python that the tests
    ran on."""
    return DOCKERFILE.format(
        name=line.name,
        torch=line.torch,
        kind=f"CUDA {line.cuda}" if line.cuda else "the CPU",
        written=WRITTEN,
        image=CUDAS[line.cuda].image if line.cuda else "python:3.11-slim-bookworm",
        gpus="--gpus all " if line.cuda else "",
        toolkit=": g++ and Python's headers beside the image's nvcc" if line.cuda else ": g++",
        packages="g++ git python3-dev python3-venv" if line.cuda else "g++ git",
        kernels=KERNELS.format(name=line.name) if line.wheels else "",
    )


def requirements(line: Line) -> Iterator[str]:
    """All that cpt depends on: torch and the packages of the table with their versions, the rest as pyproject.toml has
    it."""
    build = line.index.rpartition("/")[2]
    pinned = {**STACK, **(FOR_ANY_LINE if line.cuda else {}), "torch": f"{line.torch}+{build}"}
    declared = {canonicalize_name(Requirement(text).name): text for text in dependencies()}
    yield f"# {WRITTEN}"
    yield f"--extra-index-url {line.index}"
    for name in ["torch", *(name for name in {**declared, **pinned} if name != "torch")]:
        yield f"{name}=={pinned[name]}" if name in pinned else declared[name]


def dependencies() -> list[str]:
    """Of cpt itself."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def kernels(line: Line) -> Iterator[str]:
    """The ready-made kernels; a file on the web is one for each Python."""
    yield f"# {WRITTEN}"
    yield from dict.fromkeys(f"--extra-index-url {wheel.index}" for wheel in line.wheels if wheel.index)
    for wheel in line.wheels:
        if wheel.url is None:
            yield wheel.requirement(PYTHON_OF_UBUNTU)
        else:
            for python in ("3.11", "3.12", "3.13"):
                yield f'{wheel.requirement(python)} ; python_version == "{python}"'


def page(text: str) -> str:
    """The page with its tables made anew."""
    for part, table in {
        "lines": lines_table(),
        "gpus": gpus_table(),
        "pypi": pypi_table(),
        "sources": sources_table(),
    }.items():
        begin, end = (mark.format(part=part) for mark in MARKS)
        text = with_part(text, begin, end, table, PAGE.name)
    return text


def lines_table() -> str:
    """One row a line."""
    heads = ["line", "torch", "CUDA", "driver", "flash-attn", "mamba-ssm", "causal-conv1d", "rests on"]
    return table(heads, map(row_of_line, LINES))


def row_of_line(line: Line) -> list[str]:
    """Of the table."""
    wheels = [line.wheel(package) for package in ("flash-attn", "mamba-ssm", "causal-conv1d")]
    driver = f"{CUDAS[line.cuda].least_driver} or newer" if line.cuda else ""
    ground = "the tests of cpt" if line.has_run else "what the projects publish"
    return [
        f"`{line.name}`",
        line.torch,
        line.cuda or "none",
        driver,
        *(f"`{one.version}`" if one else "" for one in wheels),
        ground,
    ]


def gpus_table() -> str:
    """Which GPUs each CUDA has code for."""
    rows = ([GPUS[one], one, *("yes" if cuda.has_code_for(one) else "no" for cuda in CUDAS.values())] for one in GPUS)
    return table(["GPU", "compute capability", *(f"CUDA {version}" for version in CUDAS)], rows)


def pypi_table() -> str:
    """What `pip install torch` brings on Linux."""
    return table(["torch", *TORCH_OF_PYPI], [["CUDA of the one on PyPI", *TORCH_OF_PYPI.values()]])


def sources_table() -> str:
    """Where each fact is from."""
    return table(["what", "where", "day"], map(list, SOURCES))


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [heads, ["---"] * len(heads), *rows])


if __name__ == "__main__":
    main()
