"""`cpt launch`: write the files that start a recipe on one or many nodes, and say the one command to type."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored
from cpt.errors import LaunchError
from cpt.extend import did_you_mean
from cpt.launchers.hostfile import named_hosts, read_hostfile, refuse_unreachable
from cpt.launchers.launch import Launch
from cpt.launchers.launch_checks import refuse_contradictions
from cpt.launchers.with_accelerate import accelerate_files
from cpt.launchers.with_deepspeed import deepspeed_files
from cpt.launchers.with_slurm import slurm_files
from cpt.launchers.with_torchrun import torchrun_files
from cpt.ranks import tell
from cpt.recipe.load import load_recipe

ENGINES: dict[str, Callable[[Launch], dict[str, str]]] = {
    "accelerate": accelerate_files,
    "torchrun": torchrun_files,
    "deepspeed": deepspeed_files,
    "slurm": slurm_files,
}
COMMANDS = {
    "job.sbatch": "sbatch {folder}/job.sbatch",
    "start.sh": "bash {folder}/start.sh",
    "node.sh": "bash {folder}/node.sh",
}
PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
PORT = 29500
FIRST_PORT, LAST_PORT = 1024, 65535


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter with our defaults.")] = False,
    nodes: Annotated[int, typer.Option(help="How many machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Processes on each of them, one per GPU.")] = 1,
    engine: Annotated[
        str, typer.Option("--launcher", help=f"What starts the processes: {', '.join(ENGINES)}.")
    ] = "torchrun",
    hostfile: Annotated[Path | None, typer.Option(help="A line for each node: NAME slots=GPUS.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Or their names: node-a,node-b.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files; by default launch/NAME-ENGINE-NODESxGPUS.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where the processes meet, on the first node.")] = PORT,
    interface: Annotated[
        str | None, typer.Option(help="Network interface between the nodes; by default each finds its own.")
    ] = None,
    venv: Annotated[
        Path | None, typer.Option(help="The virtual environment on the nodes; by default this one.")
    ] = None,
    no_ssh: Annotated[
        bool, typer.Option("--no-ssh", help="Do not ask the hosts now whether they can be reached.")
    ] = False,
    partition: Annotated[str | None, typer.Option(help="SLURM: the partition to queue in.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM: the account that pays.")] = None,
    time: Annotated[
        str | None, typer.Option(help="SLURM: how long a job may run before it is queued again, 24:00:00.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="SLURM: another option of sbatch: --sbatch=--qos=high. Repeat it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over existing files.")] = False,
) -> None:
    """Write the files that start a recipe, on one or many nodes.

    The files are commented and yours to edit; nothing is started.

    Example: cpt launch recipe.yaml --nodes 2 --gpus-per-node 8 --launcher slurm --partition gpu
    """
    refuse_bad_words(engine, nodes, gpus_per_node, port)
    of_slurm = {"--partition": partition, "--account": account, "--time": time}
    options = (*(f"{name}={value}" for name, value in of_slurm.items() if value), *(sbatch or ()))
    refuse_options_of_others(engine, options, hostfile, hosts)
    refuse_ignored({"--no-ssh": no_ssh and not hosts and not hostfile}, "without --hosts or --hostfile")
    if nodes == 1 and engine != "slurm":
        refuse_ignored(
            {"--interface": interface is not None, "--port": port != PORT and engine == "torchrun"}, "on one node"
        )
    loaded = load_recipe(recipe, overrides or (), lora=lora)
    work = Path.cwd()
    folder = output or Path("launch") / f"{loaded.name}-{engine}-{nodes}x{gpus_per_node}"
    launch = Launch(
        recipe=loaded,
        file=recipe,
        overrides=tuple(overrides or ()),
        lora=lora,
        engine=engine,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        hosts=chosen_hosts(engine, hostfile, hosts, nodes, gpus_per_node),
        port=port,
        hostfile=hostfile.read_text(encoding="utf-8") if hostfile else "",
        folder=folder_below(work, folder),
        venv=work / (venv or Path(sys.prefix)),
        work=work,
        interface=interface,
        sbatch=options,
    )
    refuse_contradictions(launch)
    if launch.hosts and not no_ssh:
        refuse_unreachable(launch.hosts)
    write_files(launch, force=force)


def refuse_bad_words(engine: str, nodes: int, gpus_per_node: int, port: int) -> None:
    """What can be judged without the recipe."""
    if engine not in ENGINES:
        raise LaunchError(
            f"--launcher {engine}: there is no such launcher.{did_you_mean(engine, ENGINES)} There are:"
            f" {', '.join(ENGINES)}."
        )
    for option, number in {"--nodes": nodes, "--gpus-per-node": gpus_per_node}.items():
        if number < 1:
            raise LaunchError(
                f"{option} {number}: a run has at least one. On a machine without GPUs, --gpus-per-node counts"
                " processes."
            )
    if not FIRST_PORT <= port <= LAST_PORT:
        raise LaunchError(
            f"--port {port}: take one from {FIRST_PORT} to {LAST_PORT} that nothing on the first node uses."
        )


def refuse_options_of_others(engine: str, sbatch: tuple[str, ...], hostfile: Path | None, hosts: str | None) -> None:
    """An option that this engine would not read is a misunderstanding."""
    if sbatch and engine != "slurm":
        raise LaunchError(
            f"{sbatch[0]} is an option of SLURM, but this is --launcher {engine}. Leave it out, or start it --launcher"
            " slurm."
        )
    for option in sbatch:
        if not option.startswith("-") or "\n" in option:
            raise LaunchError(f"--sbatch {option}: expected an option of sbatch, such as --sbatch=--qos=high")
    if engine == "slurm" and (hostfile or hosts):
        raise LaunchError(
            "SLURM chooses the nodes by itself. Leave --hosts and --hostfile out; for particular ones:"
            " --sbatch=--nodelist=node-a,node-b"
        )
    if hostfile and hosts:
        raise LaunchError("--hostfile and --hosts both name the nodes. Keep one.")


def folder_below(work: Path, folder: Path) -> Path:
    """Where the files go.

    Raises:
        LaunchError: not below the folder that the recipe's paths are relative to, or with characters that scripts
        would have to quote.
    """
    whole = Path(os.path.normpath(work / folder))
    if not whole.is_relative_to(work) or whole == work:
        raise LaunchError(
            f"--output {folder}: the files belong into a folder below this one ({work}), which is where every node"
            " starts. Name one: --output launch/NAME"
        )
    if not PLAIN.fullmatch(str(whole.relative_to(work))):
        raise LaunchError(
            f"--output {folder}: take a name of letters, digits, `.`, `_`, `-` and `/`; it stands in shell scripts."
        )
    return whole


def chosen_hosts(
    engine: str, hostfile: Path | None, hosts: str | None, nodes: int, gpus_per_node: int
) -> tuple[str, ...]:
    """The nodes' names; none where there is one node, since it is the one that the command is typed on."""
    if engine == "slurm" or (nodes == 1 and not hostfile and not hosts):
        return ()
    if nodes == 1:
        raise LaunchError(
            "one node needs no --hosts and no --hostfile: type the command on that node. For several: --nodes N."
        )
    if hostfile:
        return read_hostfile(hostfile, nodes=nodes, gpus_per_node=gpus_per_node)
    if hosts:
        return named_hosts(hosts, nodes=nodes)
    raise LaunchError(
        f"--nodes {nodes}: name them, --hosts node-a,node-b or --hostfile FILE. Where SLURM chooses them: --launcher"
        " slurm"
    )


def write_files(launch: Launch, *, force: bool) -> None:
    """Write them, and say the command.

    Raises:
        LaunchError: they are there already, or cannot be written.
    """
    files = ENGINES[launch.engine](launch)
    there = [launch.shown(launch.folder / name) for name in files if (launch.folder / name).exists()]
    if there and not force:
        raise LaunchError(
            f"{', '.join(there)} exist(s) already, and may have been edited. Write over with --force, or elsewhere:"
            " --output FOLDER"
        )
    try:
        launch.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (launch.folder / name).write_text(content, encoding="utf-8")
    except OSError as problem:
        raise LaunchError(
            f"--output {launch.folder}: {problem.strerror}. Name a folder that you can write: --output FOLDER"
        ) from problem
    folder = launch.shown(launch.folder)
    started = next(name for name in COMMANDS if name in files)
    tell(
        f"{launch.processes} process(es) on {launch.nodes} node(s), with {launch.engine}. Written to {folder}:"
        f" {', '.join(files)}."
    )
    tell("They say what they do; read and change them. Then, in this folder:\n")
    tell(f"    {COMMANDS[started].format(folder=folder)}")
