"""Compare the nodes of a run before its first step: versions, code, recipe, files, and one shared output folder."""

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from xxhash import xxh3_64

from cpt.data.readers.columns import sections_of
from cpt.data.readers.sources import files_of, kind_of
from cpt.distributed import local_rank, num_nodes, print_once, rank
from cpt.errors import CptError, LaunchError
from cpt.hardware import find_gpus, triton_failure
from cpt.recipe.rules import keyed_sources
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import dotted, leaves
from cpt.recipe.values import in_yaml, shortened
from cpt.runs.record import hash_of_code, installed_versions

Facts = dict[str, str]  # compared item -> its value on this node
Value = TypeVar("Value")
ONLY_SLOWER = ("GPUs", "GPU driver", "NCCL_", "GLOO_")  # differences in these are only warnings
MOST_REPORTED = 5  # differences per node
# bytes and number of files that are hashed: configs and tokenizers
SMALL = 1 << 16
FEW = 64
SECONDS_TO_APPEAR = 5.0  # network file systems show a new file late


def compare_nodes(recipe: Recipe) -> None:
    """Compare the nodes of a run; every process calls this, and raises the same LaunchError if they differ."""
    if num_nodes() == 1:
        return
    is_first = local_rank() == 0
    output = Path(recipe.output_dir).absolute()
    token = output / f".shared-{uuid4().hex}"
    problem = None
    if rank() == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            token.write_text(socket.gethostname())
        except OSError as error:
            problem = f"`output_dir` {output} cannot be written: {error.strerror}"
    report = (socket.gethostname(), facts_of_node(recipe), token.name) if is_first else None
    reports = of_each_node(report)
    hosts = distinct_names([host for host, _, _ in reports])
    shared = output / reports[0][2]  # written by the first node
    problem_of_node = (problem or look_for(shared, hosts[0]),) if is_first else None
    problems = of_each_node(problem_of_node)
    if rank() == 0:
        token.unlink(missing_ok=True)
    errors = []
    for host, (problem,) in zip(hosts, problems, strict=True):
        if problem:
            errors.append(f"{host}: {problem}")
    nodes = {host: facts for host, (_, facts, _) in zip(hosts, reports, strict=True)}
    for host in hosts:
        serious = []
        for label, difference in differences(host, nodes):
            if label.startswith(ONLY_SLOWER):
                print_once(f"warning: {host}: {difference}")
            else:
                serious.append(f"{host}: {difference}")
        errors += serious[:MOST_REPORTED]
        if len(serious) > MOST_REPORTED:
            errors.append(f"{host}: {len(serious) - MOST_REPORTED} more differences")
    if errors:
        remedy = "Start all nodes with the same environment, code, recipe and files, ideally from one shared folder."
        raise LaunchError("\n  ".join(["the nodes of this run differ:", *errors]) + f"\n{remedy}")
    print_once(f"{len(hosts)} nodes agree on versions, code, recipe and files: {', '.join(hosts)}.")


def distinct_names(hostnames: list[str]) -> list[str]:
    """Add the node's number to names that several nodes have: containers may share a hostname."""
    names = []
    for node, name in enumerate(hostnames):
        if hostnames.count(name) > 1:
            names.append(f"{name} (node {node})")
        else:
            names.append(name)
    return names


def of_each_node(value: Value | None) -> list[Value]:
    """Gather one value per node, in rank order; only one process per node passes a value, the others None."""
    values: list[Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [value for value in values if value is not None]


def differences(host: str, nodes: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield differences between a host and the majority; the first node's value breaks ties."""
    for label in dict.fromkeys(chain.from_iterable(nodes.values())):
        values = {name: facts.get(label, "missing") for name, facts in nodes.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        if values[host] == usual:
            continue
        usual_hosts = [name for name, value in values.items() if value == usual]
        listed = ", ".join(usual_hosts[:2])
        if len(usual_hosts) > 2:
            listed += f" and {len(usual_hosts) - 2} more"
        yield label, f"{label} is {shortened(values[host])}, but {shortened(usual)} on {listed}"


def look_for(token: Path, writer: str) -> str | None:
    """Return the problem of this node's output folder, or None."""
    until = time.monotonic() + SECONDS_TO_APPEAR
    while not token.exists():
        if time.monotonic() > until:
            return f"`output_dir` {token.parent} is not the same folder as on {writer}. Set it to a shared folder"
        time.sleep(0.1)
    if os.access(token.parent, os.W_OK):
        return None
    return f"`output_dir` {token.parent} cannot be written"


def facts_of_node(recipe: Recipe) -> Facts:
    gpus = find_gpus()
    settings = leaves(recipe.model_dump(mode="json", by_alias=True))
    variables: Facts = {}
    for name, value in os.environ.items():
        if name.startswith(("NCCL_", "GLOO_")) and not name.endswith("IFNAME"):
            variables[name] = value
    return {
        "Python": platform.python_version(),
        **installed_versions(),
        "CUDA of torch": str(torch.version.cuda),
        "the hash of cpt's source files": hash_of_code()[:12],
        **{f"recipe key `{dotted(key)}`": in_yaml(value) for key, value in settings},
        **files_of_recipe(recipe),
        "GPUs": f"{len(gpus)} x {gpus[0].name}" if gpus else "none",
        "GPU driver": gpus[0].driver if gpus else "none",
        "Triton": triton_failure() or "fine",
        **variables,
    }


def files_of_recipe(recipe: Recipe) -> Facts:
    """Describe the recipe's local files: their number, bytes, and a hash of names and sizes."""
    facts: Facts = {}
    for key, source in keyed_sources(*sections_of(recipe)):
        if kind_of(source.path) == "local":
            try:
                files = [Path(file.name) for file in files_of(source, key)]
                facts[f"`{key}.path`"] = described(files)
            except (CptError, OSError) as problem:
                facts[f"`{key}.path`"] = f"not readable: {problem}"
    paths = {
        "model.path": recipe.model.path,
        "tokenizer.path": recipe.tokenizer.path,
        "training.deepspeed": recipe.training.get("deepspeed"),
    }
    for key, text in paths.items():
        if isinstance(text, str) and kind_of(text) == "local":
            path = Path(text).expanduser()
            candidates = [path] if path.is_file() else path.glob("[!.]*")
            facts[f"`{key}`"] = described([file for file in candidates if file.is_file()])
    return facts


def described(files: list[Path]) -> str:
    """Hash names relative to the common folder, and sizes; for a few small files, their content too."""
    folder = os.path.commonpath([str(file.parent) for file in files] or ["."])
    sizes = 0
    digest = xxh3_64()
    for file in sorted(files):
        size = file.stat().st_size
        sizes += size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        if size <= SMALL and len(files) <= FEW:
            digest.update(file.read_bytes())
    return f"{len(files):,} files, {sizes:,} bytes, {digest.hexdigest()}"
