"""From what the parts of a rehearsal left behind to the rows of its table."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from cpt.checkpoints.manifest import read_manifest
from cpt.checkpoints.proof import logits_in_another_process, proof_text
from cpt.checkpoints.verify import verify_path
from cpt.data.store.folder import size_of
from cpt.errors import CheckpointError, CptError, LaunchError, ResourceError, TrainingError
from cpt.extend import import_user_module
from cpt.hardware import host_memory_gib
from cpt.recipe.schema import Recipe
from cpt.rehearsal.comparing import compared
from cpt.rehearsal.disk import in_words
from cpt.rehearsal.starting import Ended
from cpt.rehearsal.table import Finding, bad, good, not_run
from cpt.rehearsal.watching import HELD_OUT, LEFT_OUT, LENGTH, Memory
from cpt.runs.events import read_events
from cpt.runs.folder import METRICS

LESS_MEMORY = (
    "Set `training.gradient_checkpointing: true`, `data.sequence_length` lower, or take a DeepSpeed profile that"
    " offloads"
)
LESS_TO_EVALUATE = (
    "Set `training.per_device_eval_batch_size` lower: it is `per_device_train_batch_size` where the recipe does"
    " not say"
)
LESS_HOST_MEMORY = (
    "Set `training.per_device_train_batch_size` lower, `checkpoints.in_background: false`, or offload less"
)


def why(ended: Ended) -> tuple[str, str]:
    """What a part failed of: the class of the remedy, or of the error, and a text."""
    failure = ended.failure
    if ended.stood_still is not None:
        return LaunchError.__name__, f"{ended.stood_still}, and was ended. What it said is in {ended.log}."
    if ended.was_killed:
        took = f"the processes took {in_words(ended.memory.host)} of the host's {host_memory_gib():,.1f} GiB"
        text = (
            f"a process was killed (SIGKILL), as the system does where the host's memory ends: {took}."
            f" {LESS_HOST_MEMORY}."
        )
        return ResourceError.__name__, f"{text} What it said before is in {ended.log}."
    if failure is None:
        return (
            LaunchError.__name__,
            f"ended with code {ended.code} without a word of its own. What the launcher said is in {ended.log}.",
        )
    ends = "OutOfMemory" in failure.error or "out of memory" in failure.message.lower()
    first = failure.message.partition("\n")[0][:400]
    if ends and failure.place == "evaluation":
        return ResourceError.__name__, f"out of memory while the model was evaluated. {LESS_TO_EVALUATE}."
    if failure.is_expected:
        return failure.error, failure.message
    if ends:
        return ResourceError.__name__, f"out of memory: {first.rstrip('.')}. {LESS_MEMORY}."
    return failure.error, f"{first.rstrip('.')}. The run would end there; the whole traceback is in {ended.log}."


def failed(step: str, ended: Ended) -> Finding:
    """The row of a part that did not come to its end."""
    kind, text = why(ended)
    return bad(step, text, kind)


def judge_longest_rows(ended: Ended, run: Path, recipe: Recipe) -> Finding:
    """Whether memory suffices, and what is taken of it."""
    length = ended.report(LENGTH)
    ends = [event for event in read_events(run) if event["kind"] == "out_of_memory"]
    if ends and ended.is_done:
        asked, fits = ends[0]["before"], ends[-1]["micro_batch"]
        found = (
            f"out of memory with micro-batches of {asked} full rows, in step {ends[0]['step']}; {fits} at a time fit"
        )
        write = f"`training.per_device_train_batch_size: {fits}`"
        if recipe.budget.global_batch_tokens is None:
            accumulation = asked // fits * int(recipe.training.get("gradient_accumulation_steps", 1))
            write += f" and `training.gradient_accumulation_steps: {accumulation}`"
        return bad(
            "longest rows",
            ResourceError(f"{found} ({memory_in_words(ended.memory)}). Write {write}: the same rows make a step."),
        )
    if not ended.is_done:
        return failed("longest rows" if length is not None else judge_start(ended), ended)
    steps = [ended.seconds_before("step ends", step) or 0.0 for step in range(1, ended.number_of("step ends") + 1)]
    rows = (
        f"{length['micro_batch']} x {length['gradient_accumulation_steps']} rows of {recipe.data.sequence_length:,}"
        " tokens"
    )
    of_process = length["micro_batch"] * length["gradient_accumulation_steps"] * recipe.data.sequence_length
    processes = length["tokens_per_step"] // of_process
    each = f" on each of {processes} processes" if processes > 1 else ""
    return good("longest rows", f"{memory_in_words(ended.memory)}; {steps[-1]:.2f} s for a step of {rows}{each}")


def judge_start(ended: Ended) -> str:
    """The row of what failed before there was a trainer."""
    if ended.failure is None:
        return "start"
    return "evaluation" if "`evaluation." in ended.failure.message else ended.failure.place or "start"


def memory_in_words(memory: Memory) -> str:
    """GPU and host."""
    gpu = (
        f"GPU {in_words(memory.allocated)} ({in_words(memory.reserved)} reserved) of {in_words(memory.of_gpu)}, "
        if memory.of_gpu
        else ""
    )
    return f"{gpu}host {in_words(memory.host)} of {host_memory_gib():,.1f} GiB"


def judge_first_steps(ended: Ended, run: Path) -> Finding:
    """Steps of the run's own rows."""
    made = losses(run)
    if not made:
        return (
            failed("first steps", ended)
            if not ended.is_done and is_of(ended, None)
            else not_run("first steps", "no step was made")
        )
    bad_ones = [
        str(event["message"])
        for event in read_events(run)
        if event["kind"] in ("nan_skipped", "spike_skipped", "rolled_back")
    ]
    if bad_ones or not all(math.isfinite(loss) for loss in made.values()):
        text = bad_ones[0] if bad_ones else f"losses {', '.join(f'{loss:.4f}' for loss in made.values())}"
        remedy = "A run that begins so will not learn: set `optimizer.learning_rate` lower, look at the data"
        return bad("first steps", TrainingError(f"{text} {remedy}."))
    if not ended.is_done and is_of(ended, None):
        return failed("first steps", ended)
    if ends := [str(event["message"]) for event in read_events(run) if event["kind"] == "out_of_memory"]:
        return bad("first steps", ResourceError(f"{ends[0]} Saves and evaluations take memory too. {LESS_MEMORY}."))
    said = ", ".join(f"{loss:.4f}" for loss in made.values())
    seconds = ended.seconds_before("step ends", max(made)) or 0.0
    return good(
        "first steps",
        f"loss {said}; {seconds:.2f} s for a step; with evaluation and save {memory_in_words(ended.memory)}",
    )


def is_of(ended: Ended, place: str | None) -> bool:
    """Whether it failed in what this row of the table is about; a process that could not speak failed in its steps."""
    return (ended.failure.place if ended.failure is not None else None) == place


def losses(run: Path) -> dict[int, float]:
    """By step."""
    path = run / METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def judge_evaluation(ended: Ended, recipe: Recipe) -> Finding:
    """Held-out sets and samples, before the first step and after the save's."""
    if not ended.is_done and is_of(ended, "evaluation"):
        return failed("evaluation", ended)
    counts: dict[str, list[int]] | None = ended.report(HELD_OUT)
    if counts is None:
        return not_run("evaluation", "the run did not come to it")
    section = recipe.evaluation
    if not counts:
        return not_run("evaluation", "the recipe holds nothing out; `evaluation.held_out_share: 0.01` would")
    if not ended.number_of("evaluated"):
        return not_run("evaluation", "the run did not come to it")
    sets = [f"{name} {some:,}{f' of {total:,}' if some < total else ''}" for name, (some, total) in counts.items()]
    steps = [moment["step"] for moment in ended.moments if moment["what"] == "evaluated"]
    figure = f"{', '.join(sets)} documents, in steps {', '.join(map(str, steps))}"
    prompts = f"; 1 of {len(section.prompts)} prompts continued" if section.prompts else ""
    return good("evaluation", figure + prompts)


def judge_save(ended: Ended, run: Path, checkpoint: Path | None) -> Finding:
    """Whether a checkpoint was published, what it takes, and how long training stood still."""
    events = read_events(run)
    if checkpoint is not None:
        seconds = ended.seconds_before("saved", read_manifest(checkpoint).step)
        blocks = next((f". {event['message']}" for event in events if event["kind"] == "saves_block"), "")
        return good("save", f"{in_words(size_of(checkpoint))}; training stood still for {seconds or 0:.2f} s{blocks}")
    if not ended.is_done and is_of(ended, "save"):
        kind, text = why(ended)
        if "no model could be loaded" in text:
            text += (
                '. ZeRO-3 needs "stage3_gather_16bit_weights_on_model_save": true; a stage of your own has to write'
                " all weights."
            )
        return bad("save", text, kind)
    if failures := [event for event in events if event["kind"] == "save_failed"]:
        remedy = " Free some, or set `output_dir` to another disk." if failures[-1]["reason"] == "storage" else ""
        return bad("save", ResourceError(f"{failures[-1]['message']}{remedy}"))
    return not_run("save", "the run did not come to it")


def judge_files(folders: Sequence[Path]) -> Finding:
    """Every file read back and compared with what was written."""
    try:
        found = [one for folder in folders for one in verify_path(folder)]
    except CptError as problem:
        return bad("verify", problem)
    if damaged := [f"{one.folder.name}/{damage}" for one in found for damage in one.found]:
        text = (
            f"{'; '.join(damaged[:3])}. The disk does not hold what is written to it: set `output_dir` to another one."
        )
        return bad("verify", CheckpointError(text))
    files = sum(len(read_manifest(one.folder).files) for one in found)
    return good("verify", f"{files} files ({in_words(sum(one.num_bytes for one in found))}) are what was written")


def judge_export(ended: Ended, export: Path, recipe: Recipe) -> Finding:
    """Whether plain transformers loads what the run would hand over."""
    if not (export / "config.json").exists():
        return (
            failed("export", ended)
            if not ended.is_done and is_of(ended, "export")
            else not_run("export", "the run did not come to it")
        )
    size = in_words(size_of(export))
    if recipe.model.trust_remote_code:
        return good("export", f"{size}; not loaded here, since it needs code of its own")
    try:
        if recipe.model.import_ is not None:
            import_user_module(recipe.model.import_)
        config = AutoConfig.from_pretrained(export)
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        logits = logits_in_another_process(export, proof_text(AutoTokenizer.from_pretrained(export), config), dtype)
    except (CptError, ValueError, OSError) as problem:
        return bad("export", str(problem), CheckpointError.__name__)
    if not bool(logits.isfinite().all()):
        return bad("export", CheckpointError("the exported model's logits are not finite."))
    return good("export", f"{size}; plain transformers loads it, its logits are finite")


def judge_resume(
    ended: Ended, straight: dict[int, float], run: Path, checkpoint: Path, exports: tuple[Path, Path], half: bool
) -> Finding:
    """Whether new processes go on from the checkpoint as if nothing had been.

    Args:
        straight: losses of the run that was not interrupted.
        exports: its model, and that of the resumed one.
        half: the run computes in 16 bits.
    """
    ends_alike = is_of(ended, "export") and not exports[0].exists()  # as the other one did; its steps were made
    if not ended.is_done and not ends_alike:
        kind, text = why(ended)
        if "holds more than tensors" in text:
            text += (
                " Better: have optimizer, schedule and callbacks keep tensors, numbers, texts, lists and dicts only."
            )
        return bad("resume", text, kind)
    began: int = ended.moments[0]["step"] if ended.moments else 0
    manifest = read_manifest(checkpoint)
    if began != manifest.step:
        return bad(
            "resume", CheckpointError(f"the run began at step {began} instead of going on from {checkpoint.name}.")
        )
    return compared(straight, losses(run), exports, manifest, half=half)


def judge_tasks(ended: Ended, recipe: Recipe) -> Finding:
    """The tasks that follow the training."""
    if not ended.is_done:
        return failed("tasks", ended)
    names = ", ".join(task.name for task in recipe.evaluation.tasks)
    left_out: list[str] = ended.report(LEFT_OUT) or []
    return good("tasks", f"{names}: a few questions each{''.join(f'; not run: {one}' for one in left_out)}")
