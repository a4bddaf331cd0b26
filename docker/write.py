"""Write the Dockerfiles and their requirements from docker/builds.py: `python -m docker.write`."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docker.builds import BUILDS, Build

ROOT = Path(__file__).resolve().parents[1]
PYTHON_OF_UBUNTU = "3.12"  # of 24.04, the base of NVIDIA's images
WRITTEN = "written by `python -m docker.write` from docker/builds.py"
IMAGES = {  # CUDA -> image with its nvcc, to compile flash-attn or Mamba kernels that have no wheel
    "12.6": "nvidia/cuda:12.6.3-devel-ubuntu24.04",
    "12.8": "nvidia/cuda:12.8.1-devel-ubuntu24.04",
    "13.0": "nvidia/cuda:13.0.2-devel-ubuntu24.04",
}
STACK = {  # versions that the tests run with, on the CPU
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
}
OF_GPUS = {
    "bitsandbytes": "0.50.2",
    "liger-kernel": "0.8.5",
}  # bitsandbytes has a library for each CUDA above
COMPILERS_FOR_CPUS = (
    "DeepSpeed compiles its communication and its optimizer at their first use: g++"
)
COMPILERS_FOR_GPUS = "Triton compiles the GPU's kernels, DeepSpeed its optimizer: g++ (with gcc) and Python's headers"
DOCKERFILE = """\
# syntax=docker/dockerfile:1
# cpt with torch {torch} for {kind}; {written}.
#   docker build --file docker/{name}.Dockerfile --tag cpt:{name} .
#   docker run --rm {gpus}--shm-size=8g --volume "$PWD:/work" cpt:{name} doctor
FROM {image}

# {compilers}. Of these packages the distribution keeps one version.
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

# Not built by the projects themselves (docs/howto/installing.md): `--build-arg KERNELS=` leaves them out.
ARG KERNELS=yes
COPY docker/{name}-kernels.txt /opt/requirements/
RUN --mount=type=cache,target=/root/.cache/pip \\
    if [ -n "$KERNELS" ]; then pip install --requirement /opt/requirements/{name}-kernels.txt; fi
"""


def main() -> None:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


def files() -> dict[Path, str]:
    """What belongs into docker/ beside this file."""
    written = {}
    for line in BUILDS:
        written[ROOT / "docker" / f"{line.name}.Dockerfile"] = dockerfile(line)
        written[ROOT / "docker" / f"{line.name}.txt"] = "".join(
            f"{one}\n" for one in requirements(line)
        )
        if line.wheels:
            written[ROOT / "docker" / f"{line.name}-kernels.txt"] = "".join(
                f"{one}\n" for one in kernels(line)
            )
    return written


def dockerfile(line: Build) -> str:
    """The image of one line: NVIDIA's with the compiler of this CUDA, or Python's own, with the Python that the tests
    ran on."""
    return DOCKERFILE.format(
        name=line.name,
        torch=line.torch,
        kind=f"CUDA {line.cuda}" if line.cuda else "the CPU",
        written=WRITTEN,
        image=IMAGES[line.cuda] if line.cuda else "python:3.11-slim-bookworm",
        gpus="--gpus all " if line.cuda else "",
        compilers=COMPILERS_FOR_GPUS if line.cuda else COMPILERS_FOR_CPUS,
        packages="g++ git python3-dev python3-venv" if line.cuda else "g++ git",
        kernels=KERNELS.format(name=line.name) if line.wheels else "",
    )


def requirements(line: Build) -> Iterator[str]:
    """All that cpt depends on: torch and the packages of the table with their versions, the rest as pyproject.toml has
    it."""
    build = line.index.rpartition("/")[2]
    pinned = {**STACK, **(OF_GPUS if line.cuda else {}), "torch": f"{line.torch}+{build}"}
    declared = {canonicalize_name(Requirement(text).name): text for text in dependencies()}
    yield f"# {WRITTEN}"
    yield f"--extra-index-url {line.index}"
    for name in ["torch", *(name for name in {**declared, **pinned} if name != "torch")]:
        yield f"{name}=={pinned[name]}" if name in pinned else declared[name]


def dependencies() -> list[str]:
    """Of cpt itself."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]


def kernels(line: Build) -> Iterator[str]:
    """The ready-made kernels; a file on the web is one for each Python."""
    yield f"# {WRITTEN}"
    yield from dict.fromkeys(
        f"--extra-index-url {wheel.index}" for wheel in line.wheels if wheel.index
    )
    for wheel in line.wheels:
        if wheel.url is None:
            yield wheel.requirement(PYTHON_OF_UBUNTU)
        else:
            for python in ("3.11", "3.12", "3.13"):
                yield f'{wheel.requirement(python)} ; python_version == "{python}"'


if __name__ == "__main__":
    main()
