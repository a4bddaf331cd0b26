"""What one would expect of a run like this and what its folder does not hold, in one list."""

from collections.abc import Iterator

from cpt.report.found import mapping, mappings, number, text, texts
from cpt.report.held_out import evaluated
from cpt.report.record import ENVIRONMENT, INPUTS, METRICS, PLAN, RECIPE, SAMPLES, STATUS, VERDICT, Record
from cpt.runs.page import Listing, Section

WHY = {
    ENVIRONMENT: "machine, versions and code are not known",
    INPUTS: "data, tokenizer and weights are not known; a run writes it when its data are ready",
    STATUS: "how the run stands is not known",
}


def missing(record: Record) -> Section:
    """Empty where all is there."""
    lines = [*record.unreadable, *files(record), *figures(record)]
    return Section("Missing in this record", [Listing(lines)] if lines else [])


def files(record: Record) -> Iterator[str]:
    """Those that each run has."""
    folder = record.folder
    if not (folder / RECIPE).is_file():
        yield f"{RECIPE}: what was asked for is not known."
    for name, why in WHY.items():
        if not (folder / name).is_file():
            yield f"{name}: {why}."
    if not (folder / PLAN).is_file() and mapping(record.environment, "hardware"):
        has_gpu = texts(record.environment, "hardware", "gpus")
        why = (
            "memory and speed have no plan to be held against"
            if has_gpu
            else "memory has no plan to be held against: the run had no GPU"
        )
        yield f"{PLAN}: {why}."
    if not (folder / METRICS).is_file():
        yield f"{METRICS}: there are no curves."
    elif not record.metrics.names or "loss" not in record.metrics.names:
        yield f"{METRICS} holds no training loss."
    is_judged = evaluated(record) or mappings(record.recipe, "evaluation", "tasks")
    if is_judged and text(record.status, "state") == "finished" and not (folder / VERDICT).is_file():
        yield f"{VERDICT}: whether it worked is not judged. Do it: cpt verdict {folder}"


def figures(record: Record) -> Iterator[str]:
    """Those that a run logs when its recipe or machine is such."""
    names = record.metrics.names
    prompts = texts(record.recipe, "evaluation", "prompts")
    if prompts and not record.samples:
        yield f"{SAMPLES}: {len(prompts)} prompts were to be continued."
    for name in sorted(record.general_sets - set(evaluated(record))):
        yield f"No evaluation of `{name}`, which `evaluation.retain` names."
    if texts(record.environment, "hardware", "gpus") and "gpu_memory_peak_gib" not in names and "loss" in names:
        yield "GPU memory was not logged, though the machine has a GPU."
    if "loss" in names and "tokens_per_second" not in names:
        yield "Speed was not logged."
    if number(record.status, "step") and record.tokens is None:
        yield "How many tokens were trained on was not logged."
