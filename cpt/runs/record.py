"""Write a run's folder: its inputs (recipe, environment, hashes) and its state (status.json)."""

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_128

from cpt.distributed import (
    is_main_process,
    main_process_decides,
    name_of_launcher,
    print_once,
    same_command,
    world_size,
)
from cpt.errors import (
    DISTRIBUTION,
    CheckpointError,
    CptError,
    Interrupted,
    LaunchError,
    RecipeError,
    RestartNeeded,
)
from cpt.files import (
    DAMAGED,
    KnownHashes,
    LinesFile,
    differing_files,
    free_name,
    intact_content,
    lock_open_file,
    sealed,
    write_atomic,
)
from cpt.hardware import count_cpu_cores, find_gpus, host_memory_gib
from cpt.interrupts import CONTINUE
from cpt.recipe.load import dump_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.events import (
    logged_events,
    record_event,
    remove_heartbeats,
    skipped_steps,
    write_waiting_events,
)
from cpt.runs.folder import (
    ENVIRONMENT,
    EXPORT,
    INPUTS,
    LOCK,
    MANIFEST,
    METRICS,
    PLAN,
    RECIPE,
    RECORD,
    RESOLVED,
    STARTS,
    STATUS,
    read_object,
)
from cpt.runs.history import (
    RecipeRecord,
    read_history,
    read_record,
    restore_record,
    write_record,
)

PROBE_BYTES = 1 << 16
EXPORT_HASHES = ".export_hashes.json"

log = logging.getLogger("cpt")
PROGRESS = ("step", "steps", "checkpoint", "stopped")  # status fields kept when the state changes


@dataclass(frozen=True)
class Run:
    folder: Path
    lock: IO[str] | None = None
    """Held by the main process from `start_run` to the end of `reporting`."""
    is_done: bool = False
    """Whether the run is finished with an intact model, and its recipe asks for nothing more."""

    @property
    def export_folder(self) -> Path:
        return self.folder / EXPORT

    @property
    def is_finished(self) -> bool:
        """Whether it ended with a model whose files are all there, with the right sizes."""
        return self.has_ended and damage_of_export(self.export_folder) is None

    @property
    def has_ended(self) -> bool:
        return self.status().get("state") == "finished"

    def status(self) -> dict[str, Any]:
        """The last status; empty if there was none or the file is damaged."""
        return read_object(self.folder / STATUS)

    def skipped_share(self) -> tuple[int, int]:
        """Steps skipped by the loss guard, and all steps so far."""
        skipped = skipped_steps(self.folder)
        return skipped, max(skipped, int(self.status().get("step", 0)))

    def write_status(self, state: str, **details: Any) -> None:
        """Write the state for scripts: exit codes are unreliable, because launchers change them."""
        if is_main_process():
            self.put_status(state, **details)

    def put_status(self, state: str, **details: Any) -> None:
        """Like `write_status`, but from any process."""
        updated = datetime.now(UTC).isoformat(timespec="seconds")
        progress = {key: value for key, value in self.status().items() if key in PROGRESS}
        status = {"state": state, "updated": updated, "pid": os.getpid(), **progress, **details}
        self.write_or_warn(STATUS, status)

    def write_or_warn(self, name: str, content: dict[str, Any] | str) -> None:
        """Write a file of the run, text or JSON; on a full disk it only warns."""
        if not isinstance(content, str):
            content = json.dumps(content, indent=2, default=str) + "\n"
        try:
            write_atomic(self.folder / name, content, reuse_space=True)
        except OSError as problem:
            log.warning("%s cannot be written: %s.", self.folder / name, problem.strerror)

    def record_inputs(
        self,
        recorded: dict[str, Any],
        fingerprint: str,
        describe: Callable[[], dict[str, Any]],
        stretch: int = 0,
        renew: bool = False,
    ) -> None:
        """Record the data of this stretch of the run; CheckpointError if they changed within it, as a checkpoint's
        position is then meaningless.

        Args:
            recorded: the inputs of earlier starts; may be empty.
            renew: the recipe has changed: record all again.
        """
        path = self.folder / INPUTS
        data = recorded.get("data", {})
        recorded_fingerprint = None
        if data.get("stretch") == stretch and not renew:
            recorded_fingerprint = data["fingerprint"]
        if recorded_fingerprint not in (None, fingerprint):
            raise CheckpointError(
                f"{self.folder} began with other data (fingerprint {recorded_fingerprint}, now {fingerprint}): files,"
                " tokenizer or filters have changed. Restore them, or start a new run with --new."
                f" {path} lists the original ones."
            )
        if not is_main_process():
            return
        is_complete = recorded_fingerprint is not None and "files" in recorded
        if is_complete and path.exists():
            return
        inputs = recorded if is_complete else describe()
        inputs["data"]["stretch"] = stretch
        write_atomic(path, sealed(inputs, indent=2) + "\n", reuse_space=True)

    def record_plan(self, plan: dict[str, Any] | None, resolved: Recipe) -> None:
        """Record this start's plan (None without one), and the recipe with a value for each `auto`."""
        if not is_main_process():
            return
        if plan is not None:
            self.write_or_warn(PLAN, plan)
        self.write_or_warn(RESOLVED, dump_recipe(resolved))

    @contextmanager
    def reporting(
        self, record_with: Callable[[Callable[[BaseException], None]], None] | None = None
    ) -> Iterator[None]:
        """Update status.json while the run runs, fails or finishes.

        Args:
            record_with: is given the function that records an error, for an end without an exception.
        """
        started = time.time()
        record_end = partial(self.record_end, self.status())
        if record_with is not None:
            record_with(record_end)
        try:
            self.write_status("running")
            with self.lock or nullcontext(), logged_events(self.folder):
                yield
            # a signal in the middle of this is recorded, too
            self.write_status("finished", exit_code=0, seconds=round(time.time() - started, 1))
        except BaseException as problem:
            record_end(problem)
            raise
        finally:
            lost = write_waiting_events(self.folder)
            if lost:
                log.warning(
                    "%d event(s) could not be written to %s; this log has them.", lost, self.folder
                )

    def record_end(self, before: Mapping[str, Any], problem: BaseException) -> None:
        """Record in the status how this start ended; `before` is the status at its beginning."""
        if before.get("state") == "finished" and self.status().get("step") == before.get("step"):
            # Such as a wrong `--resume`: nothing was trained, and the finished model is unchanged.
            if is_main_process():
                self.write_or_warn(STATUS, dict(before))
            return
        exit_code = 1
        if isinstance(problem, CptError):
            exit_code = problem.exit_code
        elif isinstance(problem, KeyboardInterrupt):
            exit_code = 130
        state = "interrupted" if isinstance(problem, Interrupted) else "failed"
        write = self.write_status
        if isinstance(problem, RestartNeeded):
            # Possibly only the process that is out of memory knows; the others wait for it until they are killed.
            write = self.put_status
        write(state, error=type(problem).__name__, message=str(problem), exit_code=exit_code)


def start_run(
    recipe: Recipe,
    *,
    check: Callable[[Path], bool],
    new: bool = False,
    patience: float = 0.0,
    trains: bool = True,
) -> Run:
    """Create the run's folder and record, or open the existing one of this recipe.

    Args:
        check: called with the run's folder before anything is written; raises an error if the recipe may not run
            there, and returns whether it differs from the folder's recipe in what is learned.
        new: if the name is taken, append -2, -3, ... instead of continuing that run.
        patience: seconds to wait for another process to release the run.
        trains: False if other processes will train it and record their environment.

    Raises:
        LaunchError: another process is training this run.
        RecipeError: the folder is not writable, or has a folder where the model goes; or an error of `check`.
    """

    lock: IO[str] | None = None

    def claim() -> tuple[Path, bool]:
        nonlocal lock
        folder = recipe.output_dir / recipe.name
        if new:
            folder = free_name(folder)
        run = Run(folder)
        refuse_foreign_export(run)
        damage = None
        if run.has_ended:
            damage = damage_of_export(run.export_folder, hashes_of_export(folder))
        is_finished = run.has_ended and damage is None
        if is_finished and not check(folder):
            return folder, True
        if is_run(folder):
            refuse_unwritable(folder)
            lock = lock_run(folder, patience)
            try:
                if damage is not None:
                    set_aside_export(run.export_folder, damage)
                claim_folder(recipe, folder, check, is_checked=is_finished)
            except BaseException:
                if lock is not None:
                    lock.close()
                raise
        else:
            check(folder)
            begin_record(recipe, folder)
            lock = lock_run(folder, patience)
        if trains:
            record_environment(folder)
        remove_heartbeats(folder)  # otherwise processes of an earlier start look dead
        return folder, False

    folder, is_done = main_process_decides(claim)
    if new and "--new" in sys.argv:
        os.environ[CONTINUE] = f"the same command with `name={folder.name}` instead of `--new`"
        print_once(f"This run is in {folder}. {same_command()} continues it.")
    return Run(folder, lock, is_done)


def record_environment(folder: Path) -> None:
    """Record the environment of the first start, and of each later one the differences from it."""
    environment = describe_environment()
    if not has_results(folder):  # also after a start that failed early
        write_json(folder / ENVIRONMENT, environment)
        return
    first = read_object(folder / ENVIRONMENT)
    changes = {}
    for key, value in environment.items():
        if key == "started" or value != first.get(key):
            changes[key] = value
    LinesFile(folder / STARTS).add(json.dumps(changes, default=str))


def lock_run(folder: Path, patience: float = 0.0) -> IO[str] | None:
    """Lock the run, so that two processes do not train it at the same time; None on a file system without locks.
    LaunchError if another process still has it after `patience` seconds."""
    lock = (folder / LOCK).open("a+")
    try:
        is_locked = lock_open_file(lock, wait_seconds=patience, inherited=False)
    except BlockingIOError as problem:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        raise LaunchError(
            f"{folder} is being trained already, by {owner}. Wait for it or"
            " end it, or start another run: --new, or another name."
        ) from problem
    if not is_locked:
        lock.close()
        return None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def is_run(folder: Path) -> bool:
    """Whether a run began in this folder; its recipe may be lost."""
    return any((folder / name).exists() for name in (RECIPE, RECORD)) or has_results(folder)


def claim_folder(
    recipe: Recipe, folder: Path, check: Callable[[Path], bool], *, is_checked: bool
) -> None:
    """Continue the run in this folder, if its recipe is this one or may change to it."""
    if not has_results(folder) and Run(folder).status().get("state") in ("failed", "interrupted"):
        (folder / INPUTS).unlink(missing_ok=True)
        begin_record(recipe, folder)
        return
    if not is_checked:
        check(folder)
    restore_record(folder)
    if read_record(folder) is None:
        begin_record(recipe, folder)
        message = f"{folder / RECIPE} was damaged or lost, and was written again from this start's."
        record_event(folder, DAMAGED, message)


def has_results(folder: Path) -> bool:
    """Whether the run trained or saved something; until then it may start again with any recipe."""
    return (
        (folder / METRICS).exists()
        or (folder / EXPORT).exists()
        or any(folder.glob("checkpoint-*"))
    )


def begin_record(recipe: Recipe, folder: Path) -> None:
    refuse_unwritable(folder)
    history = [] if has_results(folder) else read_history(folder)  # written by `cpt reproduce`
    write_record(folder, RecipeRecord(recipe, history))


# --- the exported model ----------------------------------------------------------------------------------------------


def damage_of_export(folder: Path, hashes: KnownHashes | None = None) -> str | None:
    """How an exported model differs from its manifest; None if it does not.

    Args:
        hashes: compare contents too, and not only names and sizes.
    """
    if not (folder / "config.json").exists():
        return "config.json is missing"
    if not (folder / MANIFEST).exists():
        # A model without a manifest, as of an older version, counts as intact unless it can be written again.
        if hashes is not None and any(folder.parent.glob("checkpoint-*")):
            return f"{MANIFEST} is missing"
        return None
    manifest = intact_content(folder / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is damaged"
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has another size"
    if hashes is not None:
        files = {name: folder / name for name in manifest["files"]}
        for name in differing_files(hashes_in(manifest), hashes.hashes(files)):
            return f"{name} has changed"
    return None


def hashes_of_export(run: Path) -> KnownHashes:
    return KnownHashes(run / EXPORT_HASHES)


def hashes_in(manifest: dict[str, Any]) -> dict[str, str]:
    return {name: entry["xxh3_128"] for name, entry in manifest["files"].items()}


def record_export(run: Path) -> None:
    """Record the files of a new export, so that the next start does not read them again."""
    manifest = intact_content(run / EXPORT / MANIFEST)
    if manifest is not None and is_main_process():
        hashes = hashes_in(manifest)
        hashes_of_export(run).record({name: run / EXPORT / name for name in hashes}, hashes)


def set_aside_export(folder: Path, damage: str) -> None:
    """Rename a damaged export, so that the run writes it again from its last checkpoint."""
    run = folder.parent
    if not any(run.glob("checkpoint-*")):
        raise CheckpointError(
            f"{run} is finished, but {folder.name}/{damage}, and no checkpoint is left to write it again. Copy the"
            " model back, or train another run: --new, or another name."
        )
    moved = ""
    if folder.exists():
        target = free_name(folder.with_name(f"bad-{folder.name}"))
        folder.rename(target)
        moved = f"; it is now {target.name}"
    message = f"{folder}: {damage}{moved}. The model is written again from the last checkpoint."
    record_event(run, "quarantined", message, reason=damage)


def refuse_foreign_export(run: Run) -> None:
    """RecipeError if the model's folder has files before the run began: writing the model would remove them."""
    folder = run.folder
    begun = [folder / name for name in (RECIPE, RECORD, STATUS, METRICS)]
    begun += folder.glob("checkpoint-*")
    if any(run.export_folder.glob("*")) and not any(path.exists() for path in begun):
        raise RecipeError(
            f"`name`: {run.export_folder} has files, but no run began in {folder}. Move them away, or start another"
            " run: --new, or another name."
        )


def refuse_unwritable(folder: Path) -> None:
    """Create the folder, and test the operations of a save: write, sync, rename, remove. RecipeError if one fails."""
    probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(probe, bytes(PROBE_BYTES), durable=True)
    except OSError as problem:
        raise RecipeError(
            f"`output_dir`: nothing can be saved in {folder}: {problem.strerror}. Set output_dir to a writable folder."
        ) from problem
    finally:
        with suppress(OSError):
            probe.unlink()


def write_json(path: Path, content: Any) -> None:
    write_atomic(path, json.dumps(content, indent=2, default=str) + "\n", reuse_space=True)


CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = (
    "cpt",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "tokenizers",
    "safetensors",
    "grain",
    "numpy",
    "liger-kernel",
    "flash-attn",
    "bitsandbytes",
    "torchao",
    "pytorch_optimizer",
)
DECIDING_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "DS_ACCELERATOR",
    "NVIDIA_TF32",
    "CUBLAS_",
    "CUDNN_",
    "NCCL_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "ATEN_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
)
"""Variables, or their prefixes, that can change results or speed; others may be secret and are not recorded."""
OF_LAUNCHERS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_EXTENSIONS_DIR")
"""Variables among these that launchers and build tools set."""


def describe_environment() -> dict[str, Any]:
    gpus = find_gpus()
    hardware = {  # affects the results or the speed of the same arithmetic
        "processor": name_of_processor(),
        "cores": count_cpu_cores(),
        "host_memory_gib": round(host_memory_gib()),
        "gpus": [gpu.name for gpu in gpus],
        "driver": gpus[0].driver if gpus else None,
    }
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "launcher": name_of_launcher(),
        "processes": world_size(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "hardware": hardware,
        "variables": deciding_variables(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "code": hash_of_code(),
        "git": git_state(),
    }


def name_of_processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@lru_cache
def installed_version(package: str) -> str | None:
    distribution = DISTRIBUTION if package == "cpt" else package
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None


def installed_versions() -> dict[str, str]:
    """Return the installed ones of `PACKAGES`, with their versions."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        installed = installed_version(name)
        if installed is not None:
            versions[name] = installed
    return versions


def deciding_variables() -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(DECIDING_VARIABLES) and name not in OF_LAUNCHERS:
            variables[name] = value
    return variables


@lru_cache
def hash_of_code() -> str:
    """xxh3-128 of this package's source files: git does not cover installed packages or untracked files."""
    package = Path(__file__).resolve().parents[1]
    digest = xxh3_128()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def git_state() -> dict[str, str] | None:
    """Commit and uncommitted changes of the current folder; None outside a repository."""
    try:
        commit = git("rev-parse", "HEAD")
        return {
            "commit": commit.strip(),
            "changes": git("status", "--porcelain"),
            "diff": git("diff", "HEAD"),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, errors="replace"
    ).stdout
