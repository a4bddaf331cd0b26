"""What one node is, as far as nodes have to be alike: versions, code, GPUs, recipe, files, folders, room."""

import ast
import importlib.util
import os
import platform
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from cpt.cache import default_cache_dir
from cpt.cluster.contents import contents_of
from cpt.cluster.links import interface_to, link_speeds
from cpt.cluster.place import Place, addresses_of, hostname, processes_here
from cpt.errors import CptError
from cpt.hardware import SHARED_MEMORY, find_gpus, free_disk_gib, shared_memory_gib
from cpt.recipe.schema import Recipe
from cpt.runs.environment import hash_of_code, installed_version

PACKAGES = (
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "liger-kernel",
)
OF_COMMUNICATION = ("NCCL_", "GLOO_", "TORCH_NCCL_", "FI_", "UCX_")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Facts = dict[str, Any]
"""JSON, as it travels to the master."""


class Gathering:
    """The facts, gathered in a thread: a folder on a server that is gone holds whoever looks at it for ever."""

    def __init__(self, place: Place, recipe: Recipe | CptError | None) -> None:
        self.facts: Facts = {}
        self.at = "its versions"
        """What it looks at now."""
        self.thread = threading.Thread(target=self.gather, args=(place, recipe), daemon=True)
        self.thread.start()

    def gather(self, place: Place, recipe: Recipe | CptError | None) -> None:
        """Of everything, the cheap first."""
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("versions", versions),
            ("code", hash_of_code),
            ("hardware", lambda: hardware(place)),
            ("network", lambda: network(place)),
            ("room", lambda: room(recipe)),
        ]
        if isinstance(recipe, CptError):
            self.facts["recipe"] = {"error": str(recipe)}
        elif recipe is not None:
            steps.append(("recipe", lambda: recipe.model_dump(mode="json", by_alias=True)))
            steps += contents_of(recipe).items()
        for name, look in steps:
            self.at = name
            try:
                self.facts[name] = look()
            except (CptError, OSError) as problem:
                self.facts[name] = {"error": str(problem)}
            except (
                Exception
            ) as problem:  # not foreseen: told as a fact, since a thread that ends here would tell nobody
                self.facts[name] = {"error": f"{type(problem).__name__}: {problem}"}

    def result(self, seconds: float) -> Facts:
        """All of them, or those before the one that hangs, which is named under `hangs`."""
        self.thread.join(max(seconds, 0))
        return {**self.facts, "hangs": self.at} if self.thread.is_alive() else self.facts


def versions() -> Mapping[str, str | None]:
    """Of what has to be equal; torch is asked for its version without being imported."""
    own = {name: installed_version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **version_of_torch(),
        **{name: found for name, found in own.items() if found},
    }


def version_of_torch() -> dict[str, str]:
    """Its version, and those of CUDA and NCCL that it was built with or brings along."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return {}
    told = {}
    for node in ast.parse(Path(found.origin).with_name("version.py").read_text()).body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if (
            isinstance(target, ast.Name)
            and isinstance(value := node.value, ast.Constant)  # type: ignore[attr-defined]
            and isinstance(value.value, str)
        ):
            told[target.id] = value.value
    names = {"torch": told.get("__version__"), "CUDA": told.get("cuda"), "NCCL": nccl_package()}
    return {name: value for name, value in names.items() if value}


def nccl_package() -> str | None:
    """NVIDIA's package that torch's wheels ask for, whatever CUDA's number in its name."""
    for number in ("13", "12", "11"):
        try:
            return metadata.version(f"nvidia-nccl-cu{number}")
        except metadata.PackageNotFoundError:
            continue
    return None


def hardware(place: Place) -> dict[str, Any]:
    """GPUs and their driver."""
    gpus = find_gpus()
    return {
        "gpus": [gpu.name for gpu in gpus],
        "driver": gpus[0].driver if gpus else None,
        "processes": processes_here() if place.is_launched else None,
    }


def network(place: Place) -> dict[str, Any]:
    """Interfaces, what is set for them, and what the node's own name means."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(place.master)
    return {
        "interfaces": sorted(psutil.net_if_addrs()),
        "asked": {name: os.environ[name] for name in INTERFACES if name in os.environ},
        "own_name": {socket.gethostname(): addresses_of(socket.gethostname())},
        "interface": interface,
        "links": link_speeds(interface),
        "variables": {
            name: os.environ.get(name, "") for name in sorted(os.environ) if name.startswith(OF_COMMUNICATION)
        },
        "port": os.environ.get("MASTER_PORT"),
        "host": hostname(),
    }


def room(recipe: Recipe | CptError | None) -> dict[str, Any]:
    """Disks and shared memory, in GiB."""
    output = Path(recipe.output_dir).absolute() if isinstance(recipe, Recipe) else Path.cwd()
    return {
        "output": [str(output), free_disk_gib(output)],
        "store": [str(default_cache_dir().absolute()), free_disk_gib(default_cache_dir())],
        "shared_memory": shared_memory_gib(),
        "free_shared_memory": shutil.disk_usage(SHARED_MEMORY).free / 2**30 if SHARED_MEMORY.exists() else None,
    }
