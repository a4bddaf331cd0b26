"""The processes of a run: ranks, how many share a row, joining and leaving the process group, agreeing."""

import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cpt.errors import CptError, LaunchError, RecipeError, ResourceError
from cpt.files import training_program
from cpt.hardware import announce_compiling, require_programs, scripts_folder
from cpt.hf_internals import exit_now, run_exit_functions
from cpt.plugins import did_you_mean
from cpt.process import free_port

Result = TypeVar("Result")
CONTINUE = "CPT_CONTINUE"  # set for a run that began with `--new`, so that all its processes name the same command

log = logging.getLogger(__name__)
KEY = "parallelism_config"
SIZES = ("sp_size", "tp_size", "cp_size", "dp_replicate_size", "dp_shard_size")
BACKENDS = ("sp_backend", "cp_backend")
PIPELINE = (
    "pipeline parallelism: Hugging Face's Trainer has no schedule for stages of layers. Split the model with ZeRO-3 or"
    " FSDP2 instead, and rows with `sp_size`; a model that needs stages is exported in Hugging Face's format (`cpt"
    " export`), trained with Megatron-LM, NeMo or torchtitan, and brought back in the same format"
)
OF_LAUNCHERS = (  # prefixes of the variables of a launcher and of a process among others
    *("RANK", "LOCAL_RANK", "GROUP_", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "CROSS_"),
    *("TORCHELASTIC_", "TORCH_NCCL_", "ACCELERATE_", "FSDP_", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
    "SLURM_STEP_NUM_TASKS",
)
KNOWN_WARNINGS: tuple[dict[str, Any], ...] = (  # torch repeats them hundreds of times, of calls of other libraries
    {"module": r"torch\.distributed\..*"},
    {"message": r".*torch\.distributed\.(reduce_scatter_tensor|_?all_gather).*"},
    {"message": r".*gradient_checkpointing` is deprecated.*"},
    {"message": r".*`broadcast_buffers` is deprecated.*"},
)
DEFAULT_TIMEOUT_SECONDS = 1800  # of TrainingArguments.ddp_timeout
OTHER_STARTERS = {  # variable that a starter without torch's RANK sets -> what it is called
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def rank() -> int:
    """Number of this process among all of the run, as the launcher set it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process among those of its node."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def num_nodes() -> int:
    """How many machines the run has, as torchrun (also inside accelerate), DeepSpeed's launcher or srun set it."""
    if world_size() == 1:
        return 1
    of_srun = os.environ.get("SLURM_NNODES") if os.environ.get("SLURM_PROCID") == str(rank()) else None
    return int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE") or of_srun or "1")


def name_of_launcher() -> str:
    """accelerate, torchrun, deepspeed, or python, read from what each launcher leaves in the environment."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # which uses torchrun
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if "CROSS_SIZE" in os.environ else "python"


def is_main_process() -> bool:
    """True for the one process that writes files and talks to the user."""
    return rank() == 0


def same_command() -> str:
    """What continues this run, at the beginning of a sentence; a run that began with `--new` needs another command."""
    words = os.environ.get(CONTINUE, "The same command")
    return words[0].upper() + words[1:]


def tell(message: str) -> None:
    """Print a sentence for the user, once for all processes."""
    if is_main_process():
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def has_process_group() -> bool:
    """True where this process is connected with others; asking does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def leave(code: int) -> NoReturn:
    """End this process now, with what was registered for its end (trackers finish their uploads there).

    With a process group, Python's own shutdown is left out: a thread of gloo that still holds the last tensors needs
    Python's lock to drop them, and then hangs or aborts the process (seen in a third of short runs with torch 2.13 and
    DeepSpeed).
    """
    if not has_process_group():
        sys.exit(code)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


def main_process_first(work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, then, when it succeeded, on all the others.

    A CptError of the main process is raised on every rank, so that no process waits for one that has given up.
    """
    results: list[Result] = []
    main_process_decides(lambda: results.append(work()))
    return results[0] if results else work()


def main_process_decides(work: Callable[[], Result]) -> Result:
    """What `work` returns on the main process, the only one that runs it, on every process.

    A CptError of the main process is raised on every rank.
    """
    if world_size() == 1:
        return work()
    import torch.distributed as dist

    decided: list[Any] = [None, None]
    if is_main_process():
        try:
            decided[0] = work()
        except CptError as problem:
            decided[1] = problem
        except BaseException as problem:
            dist.broadcast_object_list([None, CptError(f"the main process failed: {problem!r}")], src=0)
            raise
    dist.broadcast_object_list(decided, src=0)
    if decided[1] is not None:
        raise decided[1]
    return decided[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Parallelism:
    """Sizes of groups of processes; 1 where nothing is split that way."""

    sp_size: int = 1
    """Processes that share each row, a part of its tokens on each (DeepSpeed Ulysses)."""
    tp_size: int = 1
    """Processes that share each layer's matrices."""
    cp_size: int = 1
    """Processes that share each row by torch's context parallelism."""
    dp_replicate_size: int = 1
    """Copies of a model that FSDP2 splits within each copy."""
    dp_shard_size: int = 1
    """Processes over which FSDP2 splits a copy."""

    @property
    def sharing_rows(self) -> int:
        return self.sp_size * self.tp_size * self.cp_size


def read_parallelism(training: Mapping[str, Any]) -> Parallelism:
    """The sizes that the recipe's section `training` asks for; a RecipeError for a wrong key or size."""
    given = training.get(KEY)
    if given is None:
        return Parallelism()
    if not isinstance(given, Mapping):
        raise RecipeError(f"`training.{KEY}` is {given!r}; write keys and values, such as {{sp_size: 2}}.")
    known = (*SIZES, *BACKENDS)
    for key, value in given.items():
        where = f"`training.{KEY}.{key}`"
        if key.startswith("pp_"):
            raise RecipeError(f"{where}: {PIPELINE}.")
        if key not in known:
            raise RecipeError(f"{where} is not a key of it.{did_you_mean(key, known)} It has: {', '.join(known)}.")
        if key in SIZES and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise RecipeError(f"{where} is {value!r}; it must be a whole number of processes, 1 or more.")
    return Parallelism(**{key: value for key, value in given.items() if key in SIZES})


def groups_of_rows(training: Mapping[str, Any], processes: int) -> int:
    """How many groups of processes read rows of their own: all processes, where nothing but the model is split."""
    sharing = read_parallelism(training).sharing_rows
    groups, rest = divmod(processes, sharing)
    if rest or not groups:
        raise RecipeError(
            f"`training.{KEY}` lets {sharing} processes share each row, and the run has {processes}: start a multiple"
            f" of {sharing} processes, or make its sizes smaller."
        )
    return groups


@dataclass(frozen=True)
class LaunchedAs:
    on_cpu: bool
    """Train on the CPU: no accelerator here, or the recipe says so."""
    deepspeed_config: str | dict[str, Any] | None
    """What `TrainingArguments.deepspeed` must be: from the recipe, or from accelerate's config."""
    timeout: timedelta
    """How long a process waits for the others."""


def join_processes(training: Mapping[str, Any]) -> LaunchedAs:
    """Make this process part of the run; call it before anything of the model or the data, and `start_deepspeed` after
    the checks. `training` is the recipe's section.

    Raises:
        LaunchError: the processes do not know each other, or the launcher contradicts the recipe.
        ResourceError: DeepSpeed, or the compilers that it needs here, are missing.
    """
    import torch
    import torch.distributed as dist

    deepspeed_config = agree_with_launcher(training)
    by_accelerate = os.environ.get("ACCELERATE_USE_CPU") == "True"
    on_cpu = bool(training.get("use_cpu")) or by_accelerate or not torch.cuda.is_available()
    timeout = timedelta(seconds=training.get("ddp_timeout", DEFAULT_TIMEOUT_SECONDS))
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", category=FutureWarning, **known)
    if on_cpu:  # accelerate asks DeepSpeed for its device even where it is not used
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        from accelerate.utils import check_cuda_p2p_ib_support

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not check_cuda_p2p_ib_support():  # `accelerate launch` sets these, torchrun and deepspeed do not
            os.environ.setdefault("NCCL_P2P_DISABLE", "1")
            os.environ.setdefault("NCCL_IB_DISABLE", "1")
    if deepspeed_config is not None:
        if on_cpu:
            require_programs("g++", "ninja", reason="DeepSpeed on a CPU compiles its communication")
        if not shutil.which("ninja"):  # torch looks on the PATH only, where a virtual environment may be missing
            os.environ["PATH"] = f"{scripts_folder()}{os.pathsep}{os.environ.get('PATH', '')}"
    is_sharded = deepspeed_config is not None or bool(training.get("fsdp"))
    if is_sharded:  # engines that shard need a group, even of one process that no launcher started
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        if "RANK" not in os.environ:
            alone["MASTER_PORT"] = str(free_port())
        for variable, value in alone.items():
            os.environ.setdefault(variable, value)
    if (is_sharded or world_size() > 1) and not dist.is_initialized():
        try:  # gloo for what lies in host memory, NCCL for the GPUs
            dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=timeout)
        except (dist.DistNetworkError, dist.DistStoreError, ValueError) as problem:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            text = f"process {rank()} of {world_size()} did not meet the others at {address}: {problem}"
            raise LaunchError(text) from problem
    return LaunchedAs(on_cpu, deepspeed_config, timeout)


def start_deepspeed(launched: LaunchedAs) -> None:
    """Let DeepSpeed know the processes, before the model is built: ZeRO-3 would build it for a world of one.

    When it is first used, it compiles its communication here, which a recipe with mistakes should not wait for.
    """
    if launched.deepspeed_config is None:
        return
    try:
        import deepspeed  # reads DS_ACCELERATOR when it is imported
    except ImportError as problem:
        raise ResourceError(
            f"the recipe uses DeepSpeed, which cannot be imported: {problem}. Install it: pip install deepspeed"
        ) from problem
    backend = "gloo" if launched.on_cpu else "nccl"
    if launched.on_cpu and is_main_process():
        announce_compiling("deepspeed_shm_comm", "DeepSpeed compiles its communication for the CPU")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=launched.timeout, verbose=False)


def leave_processes(then: Sequence[str] = ()) -> None:
    """End this process of a run that went well, together with the others; it does not return where the run had a
    process group. The main process continues alone with module and words in `then`, as a new program in its place, so
    that the GPU is free, and its launcher waits for it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    dist.barrier()
    if not then or not is_main_process():
        leave(0)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2:  # the new program would hold sockets and devices; closed here, threads that wait would fail
            with suppress(OSError):
                os.set_inheritable(number, False)
    os.execve(sys.executable, [sys.executable, "-m", *then], environment_alone())


def environment_alone() -> dict[str, str]:
    """The environment without what makes a process one of several; with this package where it was started from its
    repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    here = str(Path(__file__).resolve().parents[1])
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")]))}


def agree_with_launcher(training: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """Compare what the launcher left in the environment with the recipe's `training:` section; a LaunchError if they
    contradict each other. Returns DeepSpeed's config, from the recipe or from accelerate's config."""
    if world_size() > 1 and "RANK" not in os.environ:  # every process would be the main one
        raise LaunchError(
            f"WORLD_SIZE is {world_size()}, but RANK is not set. Use a launcher (torchrun, accelerate, deepspeed), or"
            " set both."
        )
    for variable, starter in OTHER_STARTERS.items():
        count = os.environ.get(variable, "1")
        if "RANK" not in os.environ and count.isdigit() and int(count) > 1:
            raise LaunchError(
                f"{starter} started {count} processes, but without RANK and WORLD_SIZE each of them would train alone."
                f" Start one launcher per host instead: torchrun --nnodes N --nproc_per_node M {training_program()}"
                " RECIPE"
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "fp8":
        raise LaunchError(
            "accelerate was started with mixed_precision fp8, which cpt has not been tested with. Start with"
            " `--mixed_precision bf16`, and write `training: {bf16: true}`."
        )
    if precision != "no" and not training.get(precision):  # where the recipe has none, transformers takes accelerate's
        raise LaunchError(
            f"accelerate was started with mixed_precision {precision}, which is not in the recipe. Write"
            f" `training: {{{precision}: true}}` into the recipe, or `mixed_precision: 'no'` into accelerate's config."
        )
    check_sharding(training)
    from_recipe: str | dict[str, Any] | None = training.get("deepspeed")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return from_recipe
    from_accelerate: str | dict[str, Any] = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if not from_accelerate:  # accelerate makes a config of `zero_stage` and the like; the recipe sets the rest
        from accelerate.utils import DeepSpeedPlugin

        made: dict[str, Any] = DeepSpeedPlugin().deepspeed_config
        del made["steps_per_print"]  # infinite; the Trainer sets it again
        by_recipe: dict[str, Any] = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
        from_accelerate = {**by_recipe, "zero_force_ds_cpu_optimizer": False, **made}
    if from_recipe is not None and contents(from_recipe) != contents(from_accelerate):
        source = from_accelerate if isinstance(from_accelerate, str) else "the values in its own config"
        raise LaunchError(
            f"the recipe's `training.deepspeed` is {from_recipe}, but accelerate was started with {source}, which"
            " differs. Remove `deepspeed` from the recipe, or `deepspeed_config` from accelerate's config."
        )
    return from_accelerate if from_recipe is None else from_recipe


def check_sharding(training: Mapping[str, Any]) -> None:
    """Refuse another engine than the recipe's; of FSDP's options the recipe's alone count, as under torchrun."""
    in_recipe = bool(training.get("fsdp"))
    if in_recipe and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise LaunchError(
            "the recipe has `training.fsdp`, and accelerate was started with DeepSpeed. Remove `fsdp` from the recipe,"
            " or start with `distributed_type: MULTI_GPU` or torchrun."
        )
    by_accelerate = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if by_accelerate and not in_recipe:
        raise LaunchError(
            "accelerate was started with FSDP, which is not in the recipe. Write `training: {fsdp: true}` into the"
            " recipe, or `distributed_type: MULTI_GPU` into accelerate's config."
        )
    if by_accelerate and (ignored := [name for name in os.environ if name.startswith("FSDP_")]):
        log.warning("%s of accelerate's config are ignored: `training.fsdp_config` decides.", ", ".join(ignored))
        for name in ignored:
            del os.environ[name]
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        raise LaunchError(
            f"accelerate was started with `{KEY}` in its own config. Remove it there: the recipe's `training.{KEY}`"
            " decides."
        )


def contents(config: str | dict[str, Any]) -> dict[str, Any]:
    """The config's content, from its file where it is a path."""
    if isinstance(config, dict):
        return config
    try:
        read: dict[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise LaunchError(f"DeepSpeed config {config}: {problem}") from problem
    return read
