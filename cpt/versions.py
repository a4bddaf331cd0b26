"""Builds of torch and the GPU packages that are known to go together.

docs/installing.md and the files in docker/ are written from here: `python docker/write.py`. The sources, with their
dates, are in SOURCES.
"""

from dataclasses import dataclass

STACK = {  # what the tests ran with, on the CPU
    "transformers": "5.23.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
}
FOR_ANY_LINE = {
    "bitsandbytes": "0.50.2",
    "liger-kernel": "0.8.5",
}  # bitsandbytes has a library for each CUDA below
LATEST_SEEN = "2026-11-22"  # the day on which the package indexes were asked


@dataclass(frozen=True)
class Cuda:
    """A CUDA for which torch is published."""

    version: str
    least_driver: int
    """Its first number; from here on drivers of this CUDA's major version will do."""
    capabilities: tuple[str, ...]
    """Compute capabilities that torch's Linux builds hold code for."""
    image: str
    """Image with this CUDA's compiler."""

    def has_code_for(self, capability: str) -> bool:
        """Code of 8.6 runs on 8.6 and 8.9, not on 8.0 and not on 9.0."""
        major, minor = map(int, capability.split("."))
        built = [tuple(map(int, each.split("."))) for each in self.capabilities]
        return any(theirs == major and least <= minor for theirs, least in built)


CUDAS = {
    cuda.version: cuda
    for cuda in (
        Cuda("12.6", 525, ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0"), "nvidia/cuda:12.6.3-devel-ubuntu24.04"),
        Cuda("12.8", 525, ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0"), "nvidia/cuda:12.8.1-devel-ubuntu24.04"),
        Cuda("13.0", 580, ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0"), "nvidia/cuda:13.0.2-devel-ubuntu24.04"),
    )
}
GPUS = {  # for the page: compute capability -> GPUs
    "7.0": "V100",
    "7.5": "T4, RTX 20xx",
    "8.0": "A100, A30",
    "8.6": "RTX 3090, A6000, A10G",
    "8.9": "RTX 4090, L4, L40S",
    "9.0": "H100, H200",
    "10.0": "B200",
    "12.0": "RTX 5090, RTX PRO 6000",
}


@dataclass(frozen=True)
class Wheel:
    """A ready-made package of kernels, for one torch and one CUDA."""

    package: str
    version: str
    """As pip shows it: 2.8.3+cu128torch2.11."""
    index: str | None = None
    """Where pip looks for it besides PyPI."""
    url: str | None = None
    """Where the file is, with `{python}` for cp311, cp312, ..."""

    def requirement(self, python: str) -> str:
        """As pip takes it; `python` is such as 3.12."""
        tag = f"cp{python.replace('.', '')}"
        return f"{self.package} @ {self.url.format(python=tag)}" if self.url else f"{self.package}=={self.version}"

    def install_line(self, python: str) -> str:
        """What to type."""
        return " ".join(
            [
                "pip install",
                *([f"--extra-index-url {self.index}"] if self.index else []),
                f"'{self.requirement(python)}'",
            ]
        )


def flash_wheel(torch: str, cuda: str, release: str) -> Wheel:
    """Of github.com/mjun0812/flash-attention-prebuild-wheels; `torch` is such as 2.11."""
    version = f"2.8.3+cu{cuda.replace('.', '')}torch{torch}"
    place = "https://github.com/mjun0812/flash-attention-prebuild-wheels/releases/download"
    return Wheel(
        "flash-attn", version, url=f"{place}/{release}/flash_attn-{version}-{{python}}-{{python}}-linux_x86_64.whl"
    )


def astral_wheel(package: str, version: str, torch: str, cuda: str) -> Wheel:
    """Of github.com/astral-sh-build; `torch` is such as 2.11."""
    index = f"https://wheels.astral.sh/simple/cu{cuda.replace('.', '')}/"
    return Wheel(package, f"{version}+cu.{cuda}.torch.{torch}", index=index)


@dataclass(frozen=True)
class Line:
    """Versions that go together."""

    name: str
    torch: str
    cuda: str | None = None
    """None: the CPU build."""
    wheels: tuple[Wheel, ...] = ()
    has_run: bool = False
    """The tests of cpt ran with it; else it rests on what the projects publish and say."""

    @property
    def index(self) -> str:
        """Where torch's build for it is."""
        return f"https://download.pytorch.org/whl/{'cu' + self.cuda.replace('.', '') if self.cuda else 'cpu'}"

    @property
    def torch_line(self) -> str:
        """What installs torch."""
        return f"pip install torch=={self.torch} --index-url {self.index}"

    def wheel(self, package: str) -> Wheel | None:
        """The ready-made package; None where nobody is known to build it for this line."""
        return next((wheel for wheel in self.wheels if wheel.package == package), None)


def line_with_all_kernels(cuda: str) -> Line:
    """torch 2.11 is the newest for which all three packages are built."""
    kernels = (("mamba-ssm", "2.3.2.post1"), ("causal-conv1d", "1.6.2.post1"))
    wheels = (flash_wheel("2.11", cuda, "v0.9.4"), *(astral_wheel(*kernel, "2.11", cuda) for kernel in kernels))
    return Line(f"cuda{cuda.replace('.', '')}", "2.11.0", cuda, wheels)


LINES = (
    Line("cpu", "2.13.0", has_run=True),
    *(line_with_all_kernels(cuda) for cuda in CUDAS),
    Line("cuda130-torch213", "2.13.0", "13.0", (flash_wheel("2.13", "13.0", "v0.9.47"),)),
)
TORCH_OF_PYPI = {
    "2.11": "13.0",
    "2.12": "13.0",
    "2.13": "13.0",
    "2.14": "13.0",
    "2.15": "13.2",
}  # torch -> CUDA, Linux

SOURCES = (  # (what, where, day it was published or read)
    (
        "CUDA builds of torch 2.11 to 2.14",
        "pytorch/pytorch#194367 (RELEASE.md, Release Compatibility Matrix)",
        "2026-08-21",
    ),
    ("compute capabilities of torch 2.11", "pytorch/pytorch#175253", "2026-02-18"),
    (
        "compute capabilities of torch 2.12 to 2.14",
        "pytorch/pytorch#194367 (RELEASE.md, CUDA Support Matrix)",
        "2026-08-21",
    ),
    ("CUDA of the torch on PyPI", "`cuda-toolkit` in the requirements of its wheels on PyPI", LATEST_SEEN),
    ("drivers", "docs.nvidia.com/deploy/cuda-compatibility, Minor Version Compatibility", LATEST_SEEN),
    (
        "flash-attn: no wheels of its own from torch 2.10 on",
        "Dao-AILab/flash-attention#2248, #2299, #2425, #2442",
        "2026-04-07",
    ),
    (
        "flash-attn: built by others",
        "mjun0812/flash-attention-prebuild-wheels, doc/release_history.md, v0.9.4 and v0.9.47",
        LATEST_SEEN,
    ),
    ("mamba-ssm: own wheels end at torch 2.10", "state-spaces/mamba#999", "2026-07-23"),
    (
        "mamba-ssm, causal-conv1d: built by others",
        "astral-sh-build/build-mamba and build-causal-conv1d, README",
        LATEST_SEEN,
    ),
    (
        "C++20 from torch 2.14 on",
        "state-spaces/mamba#1000; `-std=c++17` in the three newest sdists on PyPI",
        LATEST_SEEN,
    ),
    ("bitsandbytes: CUDA 11.8, 12.1, 12.4, 12.6, 12.8, 13.0, 13.2", "the libraries in its wheel 0.50.2", LATEST_SEEN),
    (
        "that all of it can be installed together",
        "`uv pip compile` for Python 3.11, 3.12 and 3.13 (with mamba-ssm: 3.12)",
        LATEST_SEEN,
    ),
)
