"""`cpt launch`: write the files that start a recipe on one or many nodes, and print the command that starts it."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cpt.distributed import print_once
from cpt.errors import LaunchError
from cpt.plugins import did_you_mean
from cpt.recipe.keys import micro_batches_per_step
from cpt.recipe.load import load_recipe
from cpt.recipe.tree import shown_path

TEMPLATES = Path(__file__).parent / "templates"
NAME = re.compile(r"@([A-Z_]+)@")
PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:-]*[A-Za-z0-9_])?")

# Ranks follow the order of the hosts, so that a node has the same part of the work at every start.
TOGETHER = "--nnodes $NODES --node-rank $NODE_RANK --nproc-per-node $GPUS_PER_NODE --master-addr $MASTER_ADDR"
LAUNCHERS = {  # name -> the command for one node, and for each of several nodes
    "accelerate": (
        "accelerate launch --config_file $FOLDER/accelerate.yaml --main_process_port $MASTER_PORT",
        "accelerate launch --config_file $FOLDER/accelerate.yaml --num_machines $NODES --machine_rank $NODE_RANK"
        " --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT",
    ),
    "torchrun": (
        "torchrun --standalone --nproc-per-node $GPUS_PER_NODE",
        f"torchrun {TOGETHER} --master-port $MASTER_PORT",
    ),
    # Without `--no_ssh`, DeepSpeed itself starts the other hosts by pdsh, and a signal kills the run without a save.
    "deepspeed": (
        "deepspeed --num_gpus $GPUS_PER_NODE --master_port $MASTER_PORT",
        "deepspeed --hostfile $FOLDER/hostfile --no_ssh --node_rank $NODE_RANK --num_nodes $NODES"
        " --num_gpus $GPUS_PER_NODE --master_addr $MASTER_ADDR --master_port $MASTER_PORT",
    ),
    "slurm": (f"torchrun {TOGETHER} --master-port $MASTER_PORT",) * 2,
}
ALONE = """NODE_RANK=0
MASTER_PORT=${MASTER_PORT:-29500} # two runs on one machine need different ones"""
ONE_OF_SEVERAL = """NODE_RANK=${1:?index of this node in the hostfile, 0 for the first}
mapfile -t -n "$NODES" HOSTS < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$FOLDER/hostfile")
MASTER_ADDR=${HOSTS[0]} MASTER_PORT=${MASTER_PORT:-29500} # two runs with the same first host need different ports"""
IN_SLURM = """NODE_RANK=${SLURM_NODEID:?srun starts this script, from @FOLDER@/job.sbatch}
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${HOSTS[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # a different port for each job"""


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train a LoRA adapter with our defaults.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="Processes per machine, one per GPU.")
    ] = 1,
    launcher: Annotated[str, typer.Option(help=f"Launcher: {', '.join(LAUNCHERS)}.")] = "torchrun",
    hosts: Annotated[
        str | None, typer.Option(help="Nodes in the order of their ranks: node-a,node-b.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the files; by default launch/NAME-LAUNCHER-NODESxGPUS."),
    ] = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment on the nodes; default: this one.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            help="SLURM: an option of sbatch, such as --sbatch=--time=24:00:00. Repeatable."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write the files that start a recipe, on one or many nodes.

    Edit the commented files as needed; no process is started.

    Example: cpt launch recipe.yaml --nodes 2 --gpus-per-node 8 --launcher slurm --sbatch=--partition=gpu
    """
    if launcher not in LAUNCHERS:
        raise LaunchError(
            f"--launcher {launcher}: use {', '.join(LAUNCHERS)}.{did_you_mean(launcher, LAUNCHERS)}"
        )
    in_slurm = launcher == "slurm"
    is_alone = nodes == 1 and not in_slurm
    processes = nodes * gpus_per_node
    options = list(sbatch or ())
    check_options(options, in_slurm, hosts)
    loaded = load_recipe(recipe, overrides or (), lora=lora)
    micro_batches_per_step(loaded, processes)  # refused before the job waits in a queue
    if output is None:
        output = Path("launch") / f"{loaded.name}-{launcher}-{nodes}x{gpus_per_node}"
    folder = folder_below(Path.cwd(), output)
    if in_slurm and not loaded.training.get("use_cpu"):
        options.insert(0, f"--gpus-per-node={gpus_per_node}")
    arguments = [shown_path(recipe), *(overrides or ())]
    if lora:
        arguments.append("--lora")
    names = ["node.sh", "environment.sh"]
    if launcher == "accelerate":
        names.append("accelerate.yaml")
    node_command = f"bash {folder}/node.sh"  # starts the processes of one node
    if in_slurm:
        names.append("job.sbatch")
        node = IN_SLURM
        node_command = f"srun {node_command}"
        start = f"sbatch {folder}/job.sbatch"
    elif is_alone:
        if hosts:
            raise LaunchError("--hosts needs several nodes: add --nodes N.")
        node = ALONE
        start = node_command
    else:
        names.append("start.sh")
        node = ONE_OF_SEVERAL
        node_command += " NODE_RANK"
        start = f"bash {folder}/start.sh"
    alone_command, command = LAUNCHERS[launcher]
    values = {
        "name": loaded.name,
        "folder": str(folder),
        "back": os.path.relpath(".", folder),
        "recipe": shlex.join(arguments),
        "launcher": alone_command if is_alone else command,
        "nodes": nodes,
        "gpus": gpus_per_node,
        "processes": processes,
        "distributed_type": "MULTI_GPU" if processes > 1 else "'NO'",
        "venv": shlex.quote(shown_path(venv or Path(sys.prefix))),
        "start": node_command,
        "sbatch": "\n".join(f"#SBATCH {option}" for option in options),
    }
    values["node"] = filled(node, values)
    files = {name: filled((TEMPLATES / name).read_text(encoding="utf-8"), values) for name in names}
    if "start.sh" in files:
        files["hostfile"] = text_of_hostfile(hosts, nodes, gpus_per_node)
    write_files(folder, files, force=force)
    print_once(f"{processes} process(es) on {nodes} node(s), with {launcher}. Written to {folder}:")
    print_once(f"{', '.join(files)}. Check and edit them. Then run, in this folder:\n\n    {start}")


def check_options(sbatch: Sequence[str], in_slurm: bool, hosts: str | None) -> None:
    if sbatch and not in_slurm:
        raise LaunchError(f"{sbatch[0]} needs SLURM: add --launcher slurm, or remove it.")
    for option in sbatch:
        if not option.startswith("-") or "\n" in option:
            raise LaunchError(
                f"--sbatch {option}: expected an option of sbatch, such as --sbatch=--qos=high"
            )
    if in_slurm and hosts:
        raise LaunchError(
            "SLURM chooses the nodes: remove --hosts, or write --sbatch=--nodelist=node-a,node-b"
        )


def folder_below(work: Path, folder: Path) -> Path:
    """Return the folder for the files, relative to the work folder; its name must not need quotes in scripts."""
    absolute = Path(os.path.normpath(work / folder))
    if not absolute.is_relative_to(work) or absolute == work:
        raise LaunchError(
            f"--output {folder}: expected a folder below this one ({work}), such as launch/NAME"
        )
    relative = absolute.relative_to(work)
    if not PLAIN.fullmatch(str(relative)):
        raise LaunchError(f"--output {folder}: use letters, digits, `.`, `_`, `-` and `/` only.")
    return relative


def text_of_hostfile(hosts: str | None, nodes: int, slots: int) -> str:
    """Return one line per node. Only DeepSpeed reads the slots, and requires them."""
    names = [name.strip() for name in hosts.split(",")] if hosts else []
    wrong = [name for name in names if not HOST.fullmatch(name) or names.count(name) > 1]
    if wrong:
        raise LaunchError(f"--hosts {hosts}: expected distinct host names, got `{wrong[0]}`.")
    if len(names) != nodes:
        raise LaunchError(
            f"--nodes {nodes}, but --hosts has {len(names)}. Write --hosts node-a,node-b, or use --launcher slurm."
        )
    return "".join(f"{name} slots={slots}\n" for name in names)


def filled(text: str, values: dict[str, object]) -> str:
    """Replace each @NAME@ in the text; braces and dollars belong to bash."""
    return NAME.sub(lambda match: str(values[match[1].lower()]), text)


def write_files(folder: Path, files: dict[str, str], *, force: bool) -> None:
    existing = []
    for file_name in files:
        if (folder / file_name).exists():
            existing.append(str(folder / file_name))
    if existing and not force:
        raise LaunchError(
            f"{', '.join(existing)}: exists. Overwrite with --force, or choose another --output FOLDER."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as problem:
        raise LaunchError(
            f"--output {folder}: {problem.strerror}. Choose a writable folder."
        ) from problem
