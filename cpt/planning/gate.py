"""The reality gate: names, options, files, packages, disk and DeepSpeed, checked before anything is built."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from cpt.checkpoints.rotation import find_rule
from cpt.data.contamination import small_sets
from cpt.data.held_out import size_warnings
from cpt.data.open_sources import check_sources, keyed_sources, unchecked_sources
from cpt.data.readers.files import kind_of
from cpt.data.readers.forms import form_of_source, sections_of
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.evaluation.domain_test import FEWEST_QUESTIONS
from cpt.evaluation.paired import FEW, FEWEST, TOO_FEW
from cpt.evaluation.tasks import check_tasks
from cpt.hardware import find_gpus, nearest_existing, require_programs
from cpt.hub import hub_is_reachable
from cpt.models.adapters import check_lora_options
from cpt.models.compiled import check_compiling, has_experts
from cpt.models.inventory import count_model_parameters, longest_row
from cpt.models.quantized import check_quantization
from cpt.models.recomputing import read_recomputing
from cpt.optim.build import OFFLOADED, build_optimizer, check_optimizer, check_rounding, find_optimizer
from cpt.optim.released import check_release
from cpt.optim.schedules import SCHEDULES, build_schedule, phases_in_tokens
from cpt.planning.automatic import with_chosen_values, with_placeholders
from cpt.planning.check_examples import check_conversations
from cpt.planning.check_model import (
    TEACHER,
    check_model,
    check_reward_models,
    check_teacher,
    check_tokenizer,
    with_key,
)
from cpt.planning.check_resources import check_resources
from cpt.planning.craft import craft_warnings
from cpt.planning.findings import PreflightReport, placed
from cpt.plugins import did_you_mean, find
from cpt.ranks import tell, world_size
from cpt.recipe.keys import automatic_keys
from cpt.recipe.paths import unfinished_run
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Evaluation, Recipe
from cpt.recipe.tree import Node
from cpt.stages.model import check_reference
from cpt.stages.rewards.find import find_rewards
from cpt.training.callbacks import check_callbacks
from cpt.training.deepspeed_profile import (
    Profile,
    check_profile,
    offloads,
    profile_warnings,
    read_profile,
    zero_section,
)
from cpt.training.find_stage import find_stage
from cpt.training.fsdp_profile import check_fsdp
from cpt.training.loss_guard import check_loss_guard
from cpt.training.parallel_groups import check_parallelism

TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "swanlab")


def refuse_mistakes(
    recipe: Recipe, *, deepspeed: str | Profile | None = None, root: Node | None = None
) -> dict[str, Any] | None:
    """Stop the run before it costs anything; returns the plan for the GPUs that are here, for the run's record.

    Args:
        deepspeed: the profile in force, if accelerate's config names it and not the recipe.
        root: the recipe's tree (of `load_with_places`), for the lines of mistakes.

    Raises:
        CptError: all mistakes at once, in their class, or a RecipeError if their classes differ.
    """
    found = check_reality(recipe, deepspeed=deepspeed)
    if mistakes := [*found.mistakes, *found.blockers]:
        kinds = {type(mistake) for mistake in mistakes}
        kind = kinds.pop() if len(kinds) == 1 else RecipeError
        raise kind("\n".join(placed(str(mistake), root) for mistake in mistakes))
    return found.plan


def report(path: Path, recipe: Recipe, root: Node | None = None) -> PreflightReport:
    found = found_in(recipe)
    for warning in found.warnings:
        tell(f"warning: {placed(warning, root)}.")
    for group, problems in {"error": found.mistakes, "blocker on this machine": found.blockers}.items():
        for problem in problems:
            tell(f"{group}: {type(problem).__name__}: {placed(str(problem), root)}")
    for unchecked in found.unchecked:
        tell(f"not checked: {placed(unchecked, root)}")
    counts = f"{len(found.mistakes)} error(s), {len(found.blockers)} blocker(s) on this machine"
    tell(f"{path}: {counts}, {len(found.unchecked)} not checked." if found.exit_code else f"{path}: no mistakes.")
    return found


def found_in(recipe: Recipe) -> PreflightReport:
    """What the gate finds in a recipe, with values in place of `auto`."""
    chosen, unchosen = recipe, None
    try:
        chosen = with_chosen_values(recipe)
    except CptError as problem:  # mostly about the model, which the gate checks itself
        chosen, unchosen = with_placeholders(recipe), problem
    found = check_reality(chosen)
    if not any(isinstance(mistake, DataError) for mistake in [*found.mistakes, *found.blockers]):
        # else the same files would be reported twice
        found.warnings += found.run(lambda: size_warnings(*sections_of(chosen), few=FEW)) or []
    if isinstance(unchosen, ResourceError):
        keys = ", ".join(f"`training.{key}: auto`" for key in automatic_keys(recipe.training))
        found.unchecked.append(f"{keys}: chosen at the start of the run, since the model's config cannot be read here")
    elif unchosen is not None and not found.mistakes:
        found.mistakes.append(unchosen)
    return found


def check_reality(recipe: Recipe, *, deepspeed: str | Profile | None = None) -> PreflightReport:
    """Check everything that the recipe refers to, in seconds, without a GPU; nothing is written."""
    found = PreflightReport()
    elsewhere = is_for_another_machine(recipe)
    profile = found.run(check_deepspeed, recipe, deepspeed or recipe.training.get("deepspeed"), found)
    check_names(recipe, found, profile)
    check_documents(recipe, found)
    found.mistakes += check_tasks(recipe.evaluation.tasks)
    for missing in missing_packages(recipe):
        found.add(missing)
    model = check_model(recipe, found)
    check_tokenizer(recipe, model, found)
    check_teacher(recipe, model, found)
    check_reward_models(recipe, found)
    zero3 = profile is not None and zero_section(profile).get("stage") == 3
    experts = model is not None and has_experts(model)
    found.run(read_recomputing, recipe.training, zero3=zero3, experts=experts)
    even_rows, has_gpu = recipe.data.packing != "token_budget", elsewhere or torch.cuda.is_available()
    found.run(check_compiling, recipe.training, zero3=zero3, even_rows=even_rows, has_gpu=has_gpu)
    found.run(check_parallelism, recipe, profile, model, processes=world_size(), elsewhere=elsewhere)
    parameters = None if model is None else count_model_parameters(model).total
    found.warnings += craft_warnings(recipe, parameters, None if model is None else longest_row(model.config))
    if elsewhere and not recipe.training.get("use_cpu"):
        found.unchecked.append(
            "`training.bf16`: memory, since this machine has no GPU. `cpt plan RECIPE --gpu NAME` computes it"
        )
    has_disk = bool(found.run(probe_output_folder, recipe))
    if model is not None:
        check_resources(recipe, model.config, profile, found, has_disk=has_disk)
    expect_results_of_other_runs(recipe, found)
    return found


def check_documents(recipe: Recipe, found: PreflightReport) -> None:
    """The documents' files can be read, and there are enough documents for the evaluation."""
    kinds = {kind_of(source.path) for _, source in keyed_sources(recipe.data, recipe.evaluation)}
    ask_hub = "hub" in kinds and hub_is_reachable()
    found.unchecked += unchecked_sources(recipe.data, recipe.evaluation, ask_hub=ask_hub)
    sections = found.run(sections_of, recipe)
    if sections is None:
        return
    data, evaluation = sections
    complaints = check_sources(data, evaluation, ask_hub=ask_hub)
    found.mistakes += [DataError(complaint) for complaint in complaints]
    if not complaints:
        found.run(check_conversations, data)
        found.run(check_held_out_sets, recipe, data, evaluation, found)


def check_held_out_sets(recipe: Recipe, data: Data, evaluation: Evaluation, found: PreflightReport) -> None:
    """A model and its base are compared document by document."""
    for key, held_out, count in small_sets(data, evaluation, FEWEST_QUESTIONS):
        holds = f"`{key}.path`: {held_out.path} holds {count} document(s)"
        if count < FEWEST:
            found.mistakes.append(
                DataError(
                    f"{holds}. A model and its base are compared document by document, which needs at least {FEWEST},"
                    f" better {FEW}. Add some, or make each line of a text a document: `text_documents: line`."
                )
            )
        elif reported_name(held_out) not in recipe.evaluation.retain and not recipe.model.from_scratch:
            needed = f"an interval needs {FEW} or more, and below {TOO_FEW} the verdict is always unknown"
            if form_of_source(held_out) == "document":
                needed += f"; the domain test needs {FEWEST_QUESTIONS}"
            found.warnings.append(f"{holds}: {needed}. The verdict will rest on few")


def is_for_another_machine(recipe: Recipe) -> bool:
    """Whether a recipe in bf16 is checked on a machine without a GPU."""
    return bool(recipe.training.get("bf16")) and not torch.accelerator.is_available()


def expect_results_of_other_runs(recipe: Recipe, found: PreflightReport) -> None:
    """Files missing under `output_dir` are blockers, not mistakes: another run still has to make them."""
    documents = [source.path for source in recipe.data.sources] + [
        judge.path for judge in recipe.evaluation.perplexity
    ]
    read = [recipe.model.path, recipe.tokenizer.path, recipe.training.get(TEACHER), *documents]
    under = [path for path in read if isinstance(path, str) and path and recipe.output_dir in Path(path).parents]
    awaited = [path for path in under if not Path(path).exists() or unfinished_run(path)]
    for mistake in list(found.mistakes):
        if any(path in str(mistake) for path in awaited):
            found.mistakes.remove(mistake)
            found.blockers.append(mistake)
    for unchecked in list(found.unchecked):
        # `output_dir` does not exist yet, so the path looks like a Hub id
        if any(f": {path} (" in unchecked for path in awaited):
            found.unchecked.remove(unchecked)
            found.blockers.append(DataError(f"{unchecked.rpartition(' (')[0]} does not exist yet. Make it first."))


def check_names(recipe: Recipe, found: PreflightReport, profile: Profile | None) -> None:
    """Stage, optimizer, schedule, guard and retention rule exist, and accept their options."""
    zero3 = profile is not None and zero_section(profile).get("stage") == 3
    found.run(find_stage, recipe.stage)
    found.run(try_optimizer, recipe, profile)
    found.run(check_release, recipe, deepspeed=profile is not None)
    found.run(check_rounding, recipe)
    found.mistakes += [RecipeError(complaint) for complaint in found.run(check_fsdp, recipe) or ()]
    found.run(check_quantization, recipe.model.lora, zero3=zero3)
    found.run(check_lora_options, recipe.model.lora or {}, zero3=zero3)
    found.run(try_schedule, recipe)
    found.run(check_loss_guard, recipe.safety.loss_guard)
    if recipe.checkpoints.kept is not None:
        found.run(find_rule, recipe.checkpoints.kept)
    if recipe.checkpoints.archive is not None:
        found.run(check_archive, recipe.checkpoints.archive)
    found.run(find_rewards, recipe.rewards)
    found.run(check_callbacks, recipe.monitoring.callbacks)
    found.run(check_reference, recipe)


def try_optimizer(recipe: Recipe, profile: Profile | None) -> None:
    """Build it for a model of two layers; an offloading one has to be compiled, so only its options are checked."""
    with_key("optimizer.name", lambda: find_optimizer(recipe.optimizer.name))
    check_optimizer(recipe.optimizer)
    offloaded = profile is not None and offloads(profile, "optimizer")
    if offloaded and recipe.optimizer.name in OFFLOADED:
        return
    layers = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2, bias=False))
    try:
        build_optimizer(recipe.optimizer, layers, offloaded=offloaded, partitioned=profile is not None)
    except (TypeError, ValueError, IndexError) as problem:
        raise RecipeError(f"`optimizer.name`: {recipe.optimizer.name} refuses its options: {problem}") from problem


def try_schedule(recipe: Recipe) -> None:
    """Build it, and place the phases that end at a learning rate."""
    with_key("schedule.name", lambda: find("schedule", recipe.schedule.name, SCHEDULES))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        build_schedule(recipe.schedule, optimizer, tokens_per_step=1, total_tokens=recipe.budget.tokens or 10**18)
    except (TypeError, ValueError, ZeroDivisionError) as problem:
        raise RecipeError(f"`schedule.name`: {recipe.schedule.name} refuses its options: {problem}") from problem
    phases_in_tokens(recipe)


def missing_packages(recipe: Recipe) -> Iterator[CptError]:
    for number, tracker in enumerate(recipe.monitoring.trackers):
        if tracker not in INTEGRATION_TO_CALLBACK:
            known = f"{did_you_mean(tracker, INTEGRATION_TO_CALLBACK)} Known: {', '.join(INTEGRATION_TO_CALLBACK)}."
            yield RecipeError(f"`monitoring.trackers[{number}]`: no tracker called `{tracker}`.{known}")
        elif tracker in TRACKERS and importlib.util.find_spec(tracker) is None:
            yield ResourceError(
                f"`monitoring.trackers[{number}]`: {tracker} is not installed. Install it: pip install {tracker}"
            )
    on_gpu = torch.cuda.is_available() or is_for_another_machine(recipe)  # elsewhere cpt's own chunks do
    if recipe.training.get("use_liger_kernel") and on_gpu and importlib.util.find_spec("liger_kernel") is None:
        yield ResourceError("`training.use_liger_kernel`: not installed. Install it: pip install liger-kernel")


def check_deepspeed(recipe: Recipe, given: str | Profile | None, found: PreflightReport) -> Profile | None:
    """Read the profile, note its mistakes, and check for the compilers it needs."""
    if not given:
        return None
    if not find_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for its device when it is imported
    profile = read_profile(given)
    found.mistakes += [RecipeError(complaint) for complaint in check_profile(given, recipe)]
    found.warnings += profile_warnings(given, recipe)
    reason = "`training.deepspeed`: offload_optimizer compiles its optimizer" if offloads(profile, "optimizer") else ""
    if not torch.accelerator.is_available():
        reason = "`training.deepspeed`: DeepSpeed on a CPU compiles its communication"
    if reason:
        found.run(require_programs, "g++", "ninja", reason=reason)
    return profile


def probe_output_folder(recipe: Recipe) -> bool:
    """Write a file where the run's folder is or will be."""
    probe("output_dir", nearest_existing(recipe.output_dir / recipe.name))
    return True


def probe(key: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as problem:
        raise RecipeError(f"`{key}`: cannot write to {folder} ({problem.strerror}). Choose another.") from problem


def check_archive(place: str) -> None:
    """The storage exists; a local folder can be written."""
    try:
        files, path = fsspec.core.url_to_fs(place)
    except ImportError as problem:
        raise ResourceError(f"`checkpoints.archive`: {place} needs a package: {problem}") from problem
    except ValueError as problem:
        raise RecipeError(f"`checkpoints.archive`: {place}: {problem}") from problem
    if isinstance(files, LocalFileSystem):
        probe("checkpoints.archive", nearest_existing(Path(path)))
