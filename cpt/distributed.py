"""The processes of a run: ranks, shared rows, joining and leaving the process group, agreement."""

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

from cpt.errors import CptError, LaunchError, RecipeError
from cpt.files import training_program
from cpt.hardware import (
    TRITON,
    announce_compiling,
    ask_triton,
    require_programs,
    scripts_folder,
    triton_failure,
)
from cpt.hf_internals import exit_now, run_exit_functions
from cpt.interrupts import CONTINUE
from cpt.plugins import did_you_mean
from cpt.process import free_port

Result = TypeVar("Result")

log = logging.getLogger(__name__)
KEY = "parallelism_config"
SIZES = ("sp_size", "tp_size", "cp_size", "dp_replicate_size", "dp_shard_size")
BACKENDS = ("sp_backend", "cp_backend")
PIPELINE = (
    "pipeline parallelism: Hugging Face's Trainer does not support it. Shard the model with ZeRO-3 or"
    " FSDP2 instead, and rows with `sp_size`; if you need pipeline stages, export the model (`cpt"
    " export`), train it with Megatron-LM, NeMo or torchtitan, and convert it back to Hugging Face's format"
)
TENSOR_PARALLEL = (
    "Hugging Face's Trainer cannot save optimizer states under tensor parallelism, so runs could not resume"
    " (github.com/huggingface/transformers/pull/48569). Use FSDP2 or ZeRO-3, and `sp_size` for long rows"
)
OF_LAUNCHERS = (  # prefixes of variables set by launchers and for ranks
    "RANK",
    "LOCAL_RANK",
    "GROUP_",
    "ROLE_",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "CROSS_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "ACCELERATE_",
    "FSDP_",
    "PMI_",
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "SLURM_STEP_NUM_TASKS",
)
KNOWN_WARNINGS: tuple[
    dict[str, Any], ...
] = (  # torch repeats them hundreds of times, for calls in other libraries
    {"module": r"torch\.distributed\..*"},
    {"message": r".*torch\.distributed\.(reduce_scatter_tensor|_?all_gather).*"},
    {"message": r".*gradient_checkpointing` is deprecated.*"},
    {"message": r".*`broadcast_buffers` is deprecated.*"},
)
DEFAULT_TIMEOUT_SECONDS = 1800  # default of TrainingArguments.ddp_timeout
OTHER_STARTERS = {  # variable set by a starter without torch's RANK -> name of the starter
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def rank() -> int:
    """Rank of this process, as set by the launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank of this process on its node."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def num_nodes() -> int:
    """Number of machines, as set by torchrun (also in accelerate), DeepSpeed's launcher or srun."""
    if world_size() == 1:
        return 1
    count = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE")
    if not count and os.environ.get("SLURM_PROCID") == str(rank()):  # srun started the processes
        count = os.environ.get("SLURM_NNODES")
    return int(count or "1")


def name_of_launcher() -> str:
    """accelerate, torchrun, deepspeed, or python, detected from the environment."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # which uses torchrun
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "CROSS_SIZE" in os.environ:
        return "deepspeed"
    return "python"


def is_main_process() -> bool:
    """True for the process that writes files and prints messages."""
    return rank() == 0


def same_command() -> str:
    """Name the command that continues this run, to start a sentence; after `--new` it is another command."""
    command = os.environ.get(CONTINUE, "The same command")
    return command[0].upper() + command[1:]


def print_once(message: str) -> None:
    """Print a message for the user, once for all processes."""
    if is_main_process():
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def report_fallback(key: str, value: object, reason: str) -> None:
    """Log that this machine forces a value, once for all processes; a run records it as an event `fallback`."""
    if is_main_process():
        details = {"key": key, "value": value, "reason": reason}
        message = f"{key} falls back to {str(value).lower()}: {reason}."
        log.warning(message, extra={"event": "fallback", "details": details})


def has_process_group() -> bool:
    """Whether a process group exists; does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def leave(code: int) -> NoReturn:
    """End this process now, after running exit functions (trackers finish their uploads there).

    With a process group, skip Python's shutdown: a gloo thread that still holds the last tensors needs
    Python's lock to free them, and then hangs or aborts the process (seen in a third of short runs with torch 2.13 and
    DeepSpeed).
    """
    if not has_process_group():
        sys.exit(code)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


def main_process_first(work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, then, if it succeeded, on all the others.

    A CptError of the main process is raised on every rank, so that no process waits forever.
    """
    results: list[Result] = []
    main_process_decides(lambda: results.append(work()))
    if results:
        return results[0]
    return work()


def main_process_decides(work: Callable[[], Result]) -> Result:
    """Run `work` on the main process only, and return its result on every process.

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
            dist.broadcast_object_list(
                [None, CptError(f"the main process failed: {problem!r}")], src=0
            )
            raise
    dist.broadcast_object_list(decided, src=0)
    if decided[1] is not None:
        raise decided[1]
    return decided[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Parallelism:
    """Sizes of groups of processes; 1 means no split."""

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
    """Read the sizes from the recipe's section `training`; RecipeError for a wrong key or size."""
    section = training.get(KEY)
    if section is None:
        return Parallelism()
    if not isinstance(section, Mapping):
        raise RecipeError(
            f"`training.{KEY}` is {section!r}; write keys and values, such as {{sp_size: 2}}."
        )
    keys = (*SIZES, *BACKENDS)
    sizes: dict[str, int] = {}
    for key, value in section.items():
        name = f"`training.{KEY}.{key}`"
        if key.startswith("pp_"):
            raise RecipeError(f"{name}: {PIPELINE}.")
        if key not in keys:
            raise RecipeError(
                f"{name} is not a valid key.{did_you_mean(key, keys)} Keys: {', '.join(keys)}."
            )
        if key not in SIZES:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RecipeError(
                f"{name} is {value!r}; it must be a whole number of processes, 1 or more."
            )
        sizes[key] = value
    return Parallelism(**sizes)


def groups_of_rows(training: Mapping[str, Any], processes: int) -> int:
    """Number of groups of processes with separate rows: all processes, if only the model is sharded."""
    sharing = read_parallelism(training).sharing_rows
    groups, rest = divmod(processes, sharing)
    if rest or not groups:
        raise RecipeError(
            f"`training.{KEY}` lets {sharing} processes share each row, but the run has {processes}: start a multiple"
            f" of {sharing} processes, or lower its sizes."
        )
    return groups


@dataclass(frozen=True)
class LaunchedAs:
    on_cpu: bool
    """Train on the CPU: no accelerator here, or the recipe says so."""
    deepspeed_config: str | dict[str, Any] | None
    """Value for `TrainingArguments.deepspeed`, from the recipe or from accelerate's config."""
    timeout: timedelta
    """Timeout of collectives."""


def join_processes(training: Mapping[str, Any]) -> LaunchedAs:
    """Make this process part of the run; call it before building model or data, and `start_deepspeed` after the
    checks. `training` is the recipe's section.

    Raises:
        LaunchError: the processes cannot connect, or the launcher contradicts the recipe.
        ResourceError: DeepSpeed, or the compilers that it needs here, are missing.
    """
    import torch
    import torch.distributed as dist

    deepspeed_config = agree_with_launcher(training)
    by_accelerate = os.environ.get("ACCELERATE_USE_CPU") == "True"
    on_cpu = bool(training.get("use_cpu")) or by_accelerate or not torch.cuda.is_available()
    timeout = timedelta(seconds=training.get("ddp_timeout", DEFAULT_TIMEOUT_SECONDS))
    for pattern in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", category=FutureWarning, **pattern)
    if on_cpu:  # accelerate asks DeepSpeed for its device even if it is not used
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        set_up_gpu()
    if deepspeed_config is not None:
        if on_cpu:
            require_programs("g++", "ninja", reason="DeepSpeed on a CPU compiles its communication")
        if not shutil.which(
            "ninja"
        ):  # torch looks on the PATH only, where a virtual environment may be missing
            os.environ["PATH"] = f"{scripts_folder()}{os.pathsep}{os.environ.get('PATH', '')}"
    is_sharded = deepspeed_config is not None or bool(training.get("fsdp"))
    if is_sharded:  # sharding engines need a group, even for one process without a launcher
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        if "RANK" not in os.environ:
            alone["MASTER_PORT"] = str(free_port())
        for variable, value in alone.items():
            os.environ.setdefault(variable, value)
    if (is_sharded or world_size() > 1) and not dist.is_initialized():
        try:  # gloo for host memory, NCCL for GPUs
            dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=timeout)
        except (dist.DistNetworkError, dist.DistStoreError, ValueError) as problem:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            text = f"process {rank()} of {world_size()} could not connect to the others at {address}: {problem}"
            raise LaunchError(text) from problem
    if (
        not on_cpu
    ):  # a node's other processes learn from the main process; `compare_nodes` compares the nodes
        os.environ.setdefault(TRITON, main_process_decides(triton_failure))
    return LaunchedAs(on_cpu, deepspeed_config, timeout)


def set_up_gpu() -> None:
    import torch
    from accelerate.utils import check_cuda_p2p_ib_support

    if local_rank() == 0:  # before this process uses the GPU, which may admit only one
        ask_triton()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if (
        not check_cuda_p2p_ib_support()
    ):  # `accelerate launch` sets these, torchrun and deepspeed do not
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")


def start_deepspeed(launched: LaunchedAs) -> None:
    """Initialize DeepSpeed before the model is built: otherwise ZeRO-3 would build it for one process.

    Its first use compiles its communication, so it runs after the checks of the recipe.
    """
    if launched.deepspeed_config is None:
        return
    import deepspeed  # reads DS_ACCELERATOR when it is imported

    backend = "gloo" if launched.on_cpu else "nccl"
    if launched.on_cpu and is_main_process():
        announce_compiling("deepspeed_shm_comm", "DeepSpeed compiles its communication for the CPU")
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, timeout=launched.timeout, verbose=False
    )


def leave_processes(then: Sequence[str] = ()) -> None:
    """End this process of a successful run, together with the others; does not return if the run had a process group.
    The main process continues alone with module and arguments in `then`, as a new program that replaces it, so that
    the GPU is free and the launcher waits for it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    dist.barrier()
    if not then or not is_main_process():
        leave(0)
    replace_process(then, environment_alone())


def replace_process(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by a Python module with arguments, to free its GPU."""
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in map(int, os.listdir("/dev/fd")):
        # The new program would hold sockets and devices; closing them here would break waiting threads.
        if descriptor > 2:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)
    os.execve(sys.executable, [sys.executable, "-m", *words], environment)


def environment_alone() -> dict[str, str]:
    """Return the environment without variables of distributed processes; includes this package if it was started from
    its repository."""
    environment: dict[str, str] = {}
    for name, value in os.environ.items():
        if not name.startswith(OF_LAUNCHERS):
            environment[name] = value
    repository = str(Path(__file__).resolve().parents[1])
    paths = filter(None, [repository, environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def agree_with_launcher(training: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """Compare the launcher's environment with the recipe's `training:` section; LaunchError if they contradict each
    other. Return DeepSpeed's config, from the recipe or from accelerate's config."""
    if world_size() > 1 and "RANK" not in os.environ:  # every process would be the main process
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
    # Without the recipe's precision, transformers would use accelerate's.
    if precision != "no" and not training.get(precision):
        raise LaunchError(
            f"accelerate was started with mixed_precision {precision}, which is not in the recipe. Write"
            f" `training: {{{precision}: true}}` into the recipe, or `mixed_precision: 'no'` into accelerate's config."
        )
    check_other_settings(training)
    check_sharding(training)
    from_recipe: str | dict[str, Any] | None = training.get("deepspeed")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return from_recipe
    from_accelerate: str | dict[str, Any] = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if not from_accelerate:
        # accelerate builds a config from `zero_stage` etc.; the recipe sets the rest.
        from accelerate.utils import DeepSpeedPlugin

        config: dict[str, Any] = DeepSpeedPlugin().deepspeed_config
        del config["steps_per_print"]  # infinite; the Trainer sets it
        by_recipe: dict[str, Any] = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
        from_accelerate = {**by_recipe, "zero_force_ds_cpu_optimizer": False, **config}
    if from_recipe is not None and contents(from_recipe) != contents(from_accelerate):
        source = "the values in its own config"
        if isinstance(from_accelerate, str):
            source = from_accelerate
        raise LaunchError(
            f"the recipe's `training.deepspeed` is {from_recipe}, but accelerate was started with {source}, which"
            " differs. Remove `deepspeed` from the recipe, or `deepspeed_config` from accelerate's config."
        )
    if from_recipe is None:
        return from_accelerate
    return from_recipe


IGNORED_OF_ACCELERATE = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "max_grad_norm",
}
"""Variable of accelerate's config -> the key of `training:` that decides."""


def check_other_settings(training: Mapping[str, Any]) -> None:
    """Refuse what accelerate would do behind the recipe's back, and warn of numbers that the recipe has."""
    if os.environ.get("ACCELERATE_USE_MEGATRON_LM", "false").lower() == "true":
        raise LaunchError(
            "accelerate was started with Megatron-LM, which cpt does not train with. Write"
            " `distributed_type: MULTI_GPU` into accelerate's config."
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    compiles = any(training.get(f"torch_compile{end}") for end in ("", "_backend", "_mode"))
    if backend != "no" and not compiles:  # accelerate would compile the whole model
        raise LaunchError(
            f"accelerate was started with dynamo_backend {backend}, which is not in the recipe. Write"
            " `training: {torch_compile: true}` into the recipe, or `dynamo_backend: 'NO'` into accelerate's config."
        )
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        del os.environ[name]
    for name, key in IGNORED_OF_ACCELERATE.items():
        value = os.environ.pop(name, "auto")
        if value not in ("auto", "none", str(training.get(key))):
            log.warning(
                f"{key.replace('max_grad_norm', 'gradient_clipping')} {value} of accelerate's config is ignored:"
                f" the recipe's `training.{key}` decides."
            )


def check_sharding(training: Mapping[str, Any]) -> None:
    """Refuse another engine than the recipe's; only the recipe's FSDP options are used, as with torchrun."""
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
    ignored = [name for name in os.environ if by_accelerate and name.startswith("FSDP_")]
    if ignored:
        log.warning(
            "%s of accelerate's config are ignored: `training.fsdp_config` decides.",
            ", ".join(ignored),
        )
    for name in ignored:
        del os.environ[name]
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        raise LaunchError(
            f"accelerate was started with `{KEY}` in its own config. Remove it there: the recipe's `training.{KEY}`"
            " decides."
        )


def contents(config: str | dict[str, Any]) -> dict[str, Any]:
    """Return the config's content, read from its file if it is a path."""
    if isinstance(config, dict):
        return config
    try:
        content: dict[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise LaunchError(f"DeepSpeed config {config}: {problem}") from problem
    return content
