"""The reality gate: names, options, files, packages, disk and DeepSpeed, all checked before anything is built."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from cpt.data.checking.contamination import small_sets
from cpt.data.checking.files import check_sources, keyed_sources, unchecked_sources
from cpt.data.checking.held_out_share import size_warnings
from cpt.data.files import kind_of
from cpt.data.form_of_stage import sections_of
from cpt.data.forms import form_of_source
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.evaluation.domain_test import FEWEST_QUESTIONS
from cpt.evaluation.paired import FEW, FEWEST, TOO_FEW
from cpt.evaluation.tasks import check_tasks
from cpt.extend import did_you_mean, find
from cpt.hardware import find_gpus, nearest_existing, require_programs
from cpt.hub import hub_is_reachable
from cpt.models.adapters import check_adapter_under_zero3
from cpt.models.inventory import count_model_parameters, longest_row
from cpt.models.quantized import check_quantization
from cpt.monitoring.callbacks import check_callbacks
from cpt.optim.build import OFFLOADED, build_optimizer, check_optimizer, check_rounding, find_optimizer
from cpt.optim.released import check_release
from cpt.optim.schedules import SCHEDULES, build_schedule, phases_in_tokens
from cpt.preflight.automatic import with_any_values, with_chosen_values
from cpt.preflight.craft import craft_warnings
from cpt.preflight.disk import small_disk
from cpt.preflight.examples import check_conversations
from cpt.preflight.found import PreflightReport
from cpt.preflight.memory import check_memory
from cpt.preflight.model import TEACHER, check_model, check_reward_models, check_teacher, check_tokenizer, with_key
from cpt.preflight.places import placed
from cpt.preflight.saving import check_saving
from cpt.preflight.step import check_step
from cpt.ranks import tell, world_size
from cpt.recipe.automatic import automatic_keys
from cpt.recipe.run_results import unfinished_run
from cpt.recipe.schema import Data, Evaluation, Optimizer, Recipe
from cpt.recipe.sense_data import reported_name
from cpt.recipe.sense_evaluation import with_public_set
from cpt.recipe.tree import Node
from cpt.safety.loss_guard import check_loss_guard
from cpt.stages.deepspeed_profile import Profile, check_profile, offloads, profile_warnings, read_profile
from cpt.stages.find import find_stage
from cpt.stages.fsdp_profile import check_fsdp
from cpt.stages.model import check_reference
from cpt.stages.parallel_groups import check_parallelism
from cpt.stages.rewards.find import check_rewards

TRACKERS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "comet_ml": "comet_ml",
    "swanlab": "swanlab",
}


def refuse_mistakes(
    recipe: Recipe, *, deepspeed: str | Profile | None = None, root: Node | None = None
) -> dict[str, Any] | None:
    """Stop the run before it costs anything; else tell what was planned for the GPUs that are here, for the run's
    record.

    Args:
        deepspeed: the profile in force, where accelerate's config names it and not the recipe.
        root: the recipe's tree (of `load_with_places`), so that mistakes are shown with their lines.

    Raises:
        CptError: all mistakes at once, in the class of their remedy, or a RecipeError where they differ in that.
    """
    found = check_reality(recipe, deepspeed=deepspeed)
    if mistakes := [*found.mistakes, *found.blockers]:
        kinds = {type(mistake) for mistake in mistakes}
        kind = kinds.pop() if len(kinds) == 1 else RecipeError
        raise kind("\n".join(placed(str(mistake), root) for mistake in mistakes))
    return found.plan


def report(path: Path, recipe: Recipe, root: Node | None = None) -> PreflightReport:
    """Print what the gate found."""
    found = found_in(recipe)
    groups = {
        "warning": [f"{placed(warning, root)}." for warning in found.warnings],
        "error": [f"{type(mistake).__name__}: {placed(str(mistake), root)}" for mistake in found.mistakes],
        "blocker on this machine": [
            f"{type(blocker).__name__}: {placed(str(blocker), root)}" for blocker in found.blockers
        ],
        "not checked": [placed(unchecked, root) for unchecked in found.unchecked],
    }
    for group, lines in groups.items():
        for line in lines:
            tell(f"{group}: {line}")
    counts = (
        f"{len(found.mistakes)} error(s), {len(found.blockers)} blocker(s) on this machine, {len(found.unchecked)} not"
        " checked"
    )
    tell(f"{path}: {counts}." if found.exit_code else f"{path}: no mistakes.")
    return found


def found_in(recipe: Recipe) -> PreflightReport:
    """What the gate finds in a recipe that nobody has started, where it says `auto` too."""
    chosen, unchosen = recipe, None
    try:
        chosen = with_chosen_values(recipe)
    except CptError as problem:  # most often of the model, which the gate looks at by itself
        chosen, unchosen = with_any_values(recipe), problem
    found = check_reality(chosen)
    if not any(
        isinstance(mistake, DataError) for mistake in [*found.mistakes, *found.blockers]
    ):  # it would be reported twice
        found.warnings += found.run(lambda: size_warnings(*sections_of(chosen), few=FEW)) or []
    if isinstance(unchosen, ResourceError):
        keys = ", ".join(f"`training.{key}: auto`" for key in automatic_keys(recipe.training))
        found.unchecked.append(f"{keys}: chosen at the start of the run, since the model's config cannot be read here")
    elif unchosen is not None and not found.mistakes:
        found.mistakes.append(unchosen)
    return found


def check_reality(recipe: Recipe, *, deepspeed: str | Profile | None = None) -> PreflightReport:
    """Look at everything that the recipe refers to; seconds, no GPU, nothing is written."""
    found = PreflightReport()
    profile = found.run(lambda: check_deepspeed(recipe, deepspeed or recipe.training.get("deepspeed"), found))
    check_names(recipe, found, profile)
    check_documents(recipe, found)
    found.mistakes += check_tasks(recipe.evaluation.tasks)
    for missing in missing_packages(recipe):
        found.add(missing)
    model = check_model(recipe, found)
    check_tokenizer(recipe, model, found)
    check_teacher(recipe, model, found)
    check_reward_models(recipe, found)
    check_step(recipe, profile, model, found, elsewhere=is_for_another_machine(recipe))
    found.run(
        lambda: check_parallelism(
            recipe, profile, model, processes=world_size(), elsewhere=is_for_another_machine(recipe)
        )
    )
    parameters, longest = (
        (None, None) if model is None else (count_model_parameters(model).total, longest_row(model.config))
    )
    found.warnings += craft_warnings(recipe, parameters, longest)
    if is_for_another_machine(recipe) and not recipe.training.get("use_cpu"):
        found.unchecked.append(
            "`training.bf16`: memory, since this machine has no GPU. `cpt plan RECIPE --gpu NAME` computes it"
        )
    elif model is not None:
        check_memory(recipe, model.config, profile, find_gpus(), found)
    if found.run(lambda: probe_output_folder(recipe)) and model is not None:
        check_free_disk(recipe, model, found, with_master_weights=profile is not None)
    expect_results_of_other_runs(recipe, found)
    return found


def check_documents(recipe: Recipe, found: PreflightReport) -> None:
    """The documents' files are there and can be read, and there are as many as evaluation needs."""
    kinds = {kind_of(source.path) for _, source in keyed_sources(recipe.data, recipe.evaluation)}
    ask_hub = "hub" in kinds and hub_is_reachable()
    found.unchecked += unchecked_sources(recipe.data, recipe.evaluation, ask_hub=ask_hub)
    sections = found.run(lambda: sections_of(recipe))
    if sections is None:
        return
    data, evaluation = sections
    complaints = check_sources(data, evaluation, ask_hub=ask_hub)
    found.mistakes += [DataError(with_public_set(complaint, recipe.evaluation)) for complaint in complaints]
    if not complaints:
        found.run(lambda: check_conversations(data))
        found.run(lambda: check_held_out_sets(recipe, data, evaluation, found))


def check_held_out_sets(recipe: Recipe, data: Data, evaluation: Evaluation, found: PreflightReport) -> None:
    """A model and its base are compared document by document."""
    for key, held_out, count in small_sets(data, evaluation, FEWEST_QUESTIONS):
        holds = f"`{key}.path`: {held_out.path} holds {count} document(s)"
        if count < FEWEST:
            found.mistakes.append(
                DataError(
                    f"{holds}. A model and its base are compared document by document: {FEWEST} are needed at least,"
                    f" {FEW} for an interval to mean much. Add some, or make a document of each line of a text:"
                    " `text_documents: line`."
                )
            )
        elif reported_name(held_out) not in recipe.evaluation.retain and not recipe.model.from_scratch:
            needed = f"an interval leans on {FEW} or more, and below {TOO_FEW} the verdict is always unknown"
            if form_of_source(held_out) == "document":
                needed += f", and the domain test needs {FEWEST_QUESTIONS}, of each a question"
            found.warnings.append(f"{holds}: {needed}. The verdict will do without, or say that it rests on few")


def is_for_another_machine(recipe: Recipe) -> bool:
    """True for a recipe in bf16 where there is no GPU: it is written here and runs elsewhere."""
    return bool(recipe.training.get("bf16")) and not torch.accelerator.is_available()


def expect_results_of_other_runs(recipe: Recipe, found: PreflightReport) -> None:
    """What is missing under `output_dir` is not a mistake of the recipe, but a blocker: another run still has to make
    it."""
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
        if any(
            f": {path} (" in unchecked for path in awaited
        ):  # `output_dir` does not exist yet, so the path looks like a Hub id
            found.unchecked.remove(unchecked)
            found.blockers.append(DataError(f"{unchecked.rpartition(' (')[0]} does not exist yet. Make it first."))


def check_names(recipe: Recipe, found: PreflightReport, profile: Profile | None) -> None:
    """Stage, optimizer, schedule, loss guard and the rule of what stays exist, and take the options they are given."""
    found.run(lambda: find_stage(recipe.stage))
    found.run(lambda: try_optimizer(recipe, profile))
    found.run(lambda: check_release(recipe, deepspeed=profile is not None))
    found.run(lambda: check_rounding(recipe))
    found.mistakes += [RecipeError(complaint) for complaint in found.run(lambda: check_fsdp(recipe)) or ()]
    zero3 = profile is not None and zero_stage(profile) == 3
    found.run(lambda: check_quantization(recipe.model.lora, zero3=zero3))
    found.run(lambda: check_adapter_under_zero3(recipe.model.lora, zero3=zero3))
    found.run(lambda: try_schedule(recipe))
    found.run(lambda: check_loss_guard(recipe.safety.loss_guard))
    found.run(lambda: check_saving(recipe))
    found.run(lambda: check_rewards(recipe))
    found.run(lambda: check_callbacks(recipe.monitoring.callbacks))
    found.run(lambda: check_reference(recipe))


def try_optimizer(recipe: Recipe, profile: Profile | None) -> None:
    """Build it for a model of two layers; one that offloads has to be compiled first, so only its options are looked
    at."""
    with_key("optimizer.name", lambda: find_optimizer(recipe.optimizer.name))
    check_optimizer(recipe.optimizer)
    offloaded = profile is not None and offloads(profile, "optimizer")
    if offloaded and recipe.optimizer.name in OFFLOADED:
        return
    try:
        build_optimizer(
            section_without_layers(recipe.optimizer),
            two_layers(),
            offloaded=offloaded,
            partitioned=profile is not None,
        )
    except (TypeError, ValueError, IndexError) as problem:
        raise RecipeError(f"`optimizer.name`: {recipe.optimizer.name} refuses its options: {problem}") from problem


def zero_stage(profile: Profile) -> int:
    """0 without ZeRO."""
    return int((profile.get("zero_optimization") or {}).get("stage", 0))


def two_layers() -> nn.Module:
    """An embedding and a matrix."""
    return nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2, bias=False))


def section_without_layers(section: Optimizer) -> Optimizer:
    """Rates by layers are the model's own affair."""
    return section.model_copy(update={"layer_decay": None})


def try_schedule(recipe: Recipe) -> None:
    """Ask for the factor of the first step, and where it comes to the learning rates that phases end at."""
    with_key("schedule.name", lambda: find("schedule", recipe.schedule.name, SCHEDULES))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        build_schedule(recipe.schedule, optimizer, tokens_per_step=1, total_tokens=recipe.budget.tokens or 10**18)
    except (TypeError, ValueError, ZeroDivisionError) as problem:
        raise RecipeError(f"`schedule.name`: {recipe.schedule.name} refuses its options: {problem}") from problem
    phases_in_tokens(recipe)


def missing_packages(recipe: Recipe) -> Iterator[CptError]:
    """Trackers and kernels that the recipe names and that are not installed."""
    for number, tracker in enumerate(recipe.monitoring.trackers):
        if tracker not in INTEGRATION_TO_CALLBACK:
            known = (
                f"{did_you_mean(tracker, INTEGRATION_TO_CALLBACK)} transformers has:"
                f" {', '.join(INTEGRATION_TO_CALLBACK)}."
            )
            yield RecipeError(f"`monitoring.trackers[{number}]`: no tracker called `{tracker}`.{known}")
        elif tracker in TRACKERS and importlib.util.find_spec(TRACKERS[tracker]) is None:
            yield ResourceError(
                f"`monitoring.trackers[{number}]`: {tracker} is not installed. Install it: pip install"
                f" {TRACKERS[tracker]}"
            )
    on_gpu = torch.cuda.is_available() or is_for_another_machine(recipe)  # elsewhere cpt's own chunks do
    if recipe.training.get("use_liger_kernel") and on_gpu and importlib.util.find_spec("liger_kernel") is None:
        yield ResourceError(
            "`training.use_liger_kernel`: Liger is not installed. Install it: pip install liger-kernel"
        )


def check_deepspeed(recipe: Recipe, given: str | Profile | None, found: PreflightReport) -> Profile | None:
    """Read the profile, note its mistakes, and see that what it has to compile can be compiled."""
    if not given:
        return None
    if not find_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for its device when it is imported
    profile = read_profile(given)
    found.mistakes += [RecipeError(complaint) for complaint in check_profile(given, recipe)]
    found.warnings += profile_warnings(given, recipe)
    if not torch.accelerator.is_available():
        found.run(
            lambda: require_programs(
                "g++", "ninja", reason="`training.deepspeed`: DeepSpeed on a CPU compiles its communication"
            )
        )
    elif offloads(profile, "optimizer"):
        found.run(
            lambda: require_programs(
                "g++", "ninja", reason="`training.deepspeed`: offload_optimizer compiles its optimizer"
            )
        )
    return profile


def probe_output_folder(recipe: Recipe) -> bool:
    """Write a file where the run's folder is or will be made."""
    folder = recipe.output_dir / recipe.name
    place = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError as problem:
        raise RecipeError(
            f"`output_dir`: cannot write to {place} ({problem.strerror}), where {folder} belongs. Choose another."
        ) from problem


def check_free_disk(
    recipe: Recipe, model: PreTrainedModel, found: PreflightReport, *, with_master_weights: bool
) -> None:
    """The disk has room for all that the run keeps."""
    complaint = small_disk(recipe, model, with_master_weights=with_master_weights)
    if complaint is not None:
        found.add(complaint)
