"""Builds of torch, and the compiled kernels that fit each; docs/howto/installing.md has them as a table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A prebuilt package of kernels, for one torch and one CUDA."""

    package: str
    version: str
    """As shown by pip: 2.8.3+cu128torch2.11."""
    index: str | None = None
    """Package index, if not PyPI."""
    url: str | None = None
    """URL of the file, with `{python}` for cp311, cp312, ..."""

    def requirement(self, python: str) -> str:
        """Requirement for pip, for a Python such as 3.12."""
        tag = f"cp{python.replace('.', '')}"
        return (
            f"{self.package} @ {self.url.format(python=tag)}"
            if self.url
            else f"{self.package}=={self.version}"
        )


@dataclass(frozen=True)
class Build:
    """A build of torch, and its kernels."""

    name: str
    torch: str
    cuda: str | None = None
    """None: the CPU build."""
    wheels: tuple[Wheel, ...] = ()

    @property
    def index(self) -> str:
        """The package index of this build of torch."""
        return f"https://download.pytorch.org/whl/{'cu' + self.cuda.replace('.', '') if self.cuda else 'cpu'}"


def flash_wheel(torch: str, cuda: str, release: str) -> Wheel:
    """From github.com/mjun0812/flash-attention-prebuild-wheels; `torch` is a version such as 2.11."""
    version = f"2.8.3+cu{cuda.replace('.', '')}torch{torch}"
    place = "https://github.com/mjun0812/flash-attention-prebuild-wheels/releases/download"
    return Wheel(
        "flash-attn",
        version,
        url=f"{place}/{release}/flash_attn-{version}-{{python}}-{{python}}-linux_x86_64.whl",
    )


def build_with_all_kernels(cuda: str) -> Build:
    """torch 2.11 is the newest with wheels for all three; Mamba's are by github.com/astral-sh-build."""
    index = f"https://wheels.astral.sh/simple/cu{cuda.replace('.', '')}/"
    kernels = (("mamba-ssm", "2.3.2.post1"), ("causal-conv1d", "1.6.2.post1"))
    mamba = [
        Wheel(package, f"{version}+cu.{cuda}.torch.2.11", index=index)
        for package, version in kernels
    ]
    return Build(
        f"cuda{cuda.replace('.', '')}",
        "2.11.0",
        cuda,
        (flash_wheel("2.11", cuda, "v0.9.4"), *mamba),
    )


BUILDS = (
    Build("cpu", "2.13.0"),
    *map(build_with_all_kernels, ("12.6", "12.8", "13.0")),
    Build("cuda130-torch213", "2.13.0", "13.0", (flash_wheel("2.13", "13.0", "v0.9.47"),)),
)
