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

from cpt.checkpoints.retention import find_rule
from cpt.data.readers.columns import form_of_source, sections_of
from cpt.data.readers.sources import kind_of
from cpt.data.rows.contamination import small_sets
from cpt.data.rows.held_out import size_warnings
from cpt.data.rows.open_sources import check_sources, keyed_sources, unchecked_sources
from cpt.distributed import tell, world_size
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.evaluation.paired import FEW, FEWEST, TOO_FEW
from cpt.evaluation.tasks import FEWEST_QUESTIONS, check_tasks
from cpt.hardware import find_gpus, nearest_existing, require_programs
from cpt.hub import hub_is_reachable
from cpt.models.adapters import check_lora_options, check_quantization
from cpt.models.compiled import check_compiling, has_experts
from cpt.models.inventory import count_model_parameters, longest_row
from cpt.models.known_bases import known_base
from cpt.models.recomputing import read_recomputing
from cpt.optim.build import OFFLOADED, build_optimizer, check_optimizer, check_rounding, find_optimizer
from cpt.optim.gradients import check_release
from cpt.optim.schedules import SCHEDULES, build_schedule, phases_in_tokens
from cpt.planning.check_model import (
    TEACHER,
    check_conversations,
    check_model,
    check_reward_models,
    check_teacher,
    check_tokenizer,
    with_key,
)
from cpt.planning.check_resources import PreflightReport, check_resources, placed
from cpt.planning.fitting import with_chosen_values, with_placeholders
from cpt.plugins import did_you_mean, find
from cpt.recipe.keys import automatic_keys
from cpt.recipe.paths import unfinished_run
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Evaluation, Recipe
from cpt.recipe.tree import Node
from cpt.stages.models import check_reference
from cpt.stages.rewards import find_rewards
from cpt.training.arguments import check_parallelism, find_stage
from cpt.training.callbacks import check_callbacks
from cpt.training.engine_profiles import (
    Profile,
    check_fsdp,
    check_profile,
    offloads,
    profile_warnings,
    read_profile,
    zero_section,
)
from cpt.training.loss_guard import check_loss_guard

TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "swanlab")
LEAST_LEARNING_RATE, HIGHEST_FOR_ADAMW = 1e-6, 1e-2
LORA_BAND = (1e-5, 5e-4)  # the sweep of arXiv 2405.09673
LARGEST_PEAKS = {1_000_000_000: (3e-3, "SmolLM 135M, huggingface/smollm"), None: (6e-4, "Falcon 7B, its card")}
MOST_WARMUP, STRONG_REPLAY = 0.1, 0.5
REWARMING = "arXiv 2403.08763"
REPLAYED = ("replay", "general")


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
    """Check a recipe with values in place of `auto`."""
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


def craft_warnings(recipe: Recipe, parameters: int | None, max_positions: int | None) -> list[str]:
    """Each setting outside its published band, with the source.

    Args:
        parameters: of the model; None if only the Hub knows it.
        max_positions: the longest row that the model's config names.
    """
    rate, name = recipe.optimizer.learning_rate, recipe.optimizer.name
    if rate > HIGHEST_FOR_ADAMW and "adamw" in name.lower():
        return [f"`optimizer.learning_rate` is {rate:g}: {name} mostly diverges at such rates. 1e-5 to 1e-3 is usual"]
    if recipe.stage != "cpt":
        return []
    rates = [*learning_rate(recipe, parameters), *embedding_learning_rate(recipe)]
    return [*rates, *replay_share(recipe), *warmup(recipe), *rows_and_batch(recipe, max_positions)]


def learning_rate(recipe: Recipe, parameters: int | None) -> Iterator[str]:
    rate, base = recipe.optimizer.learning_rate, known_base(recipe.model.path) if recipe.model.path else None
    key = f"`optimizer.learning_rate` is {rate:g}"
    if recipe.model.lora is not None:
        low, high = LORA_BAND
        if not low <= rate <= high:
            yield f"{key}: LoRA was swept from {low:g} to {high:g}, and did best near the highest (arXiv 2405.09673)"
        return
    if rate < LEAST_LEARNING_RATE:
        yield f"{key}: so small a rate hardly changes the weights; begin near the base's last one ({REWARMING})"
    if base is not None and base.peak_learning_rate is not None:
        if rate > base.peak_learning_rate:
            known = f"{base.peak_learning_rate:g} ({base.source})"
            yield f"{key}, above the peak of the base's own pre-training, {known}: expect forgetting"
    elif parameters is not None:
        limit = next(limit for limit in LARGEST_PEAKS if limit is None or parameters < limit)
        peak, whose = LARGEST_PEAKS[limit]
        if rate > peak:
            yield f"{key}, above the largest peak published for {parameters / 1e9:.2g}B parameters, {peak:g} ({whose})"


def embedding_learning_rate(recipe: Recipe) -> Iterator[str]:
    """Embeddings that are trained along with adapters need a lower rate."""
    lora, optimizer = recipe.model.lora, recipe.optimizer
    rate = optimizer.options.get("embedding_learning_rate")
    if lora is not None and lora.get("preset") == "cpt" and not isinstance(rate, int | float):
        yield (
            "`model.lora: cpt` trains embeddings and head at the adapters' learning rate: 2 to 10 times less is usual."
            f" Write `optimizer.embedding_learning_rate: {optimizer.learning_rate / 10:g}`"
        )
    elif isinstance(rate, int | float) and rate > optimizer.learning_rate:
        yield f"`optimizer.embedding_learning_rate` is {rate:g}: 2 to 10 times below `learning_rate` is usual"


def replay_share(recipe: Recipe) -> Iterator[str]:
    """Some of what the model knows has to be replayed; sources named replay or general count as that."""
    data = recipe.data
    if len(data.sources) == 1:
        yield (
            "`data.sources` replays nothing, and the model will forget: replay 1 to 5 % of general text for a weak"
            f" shift, about 25 % for a strong one, such as another language ({REWARMING}). Pieces to use:"
            " recipes/presets/replay/"
        )
    if data.phases or data.temperature is not None:
        return
    weights = {number: source.weight for number, source in enumerate(data.sources)}
    replayed = [
        weights[number]
        for number, source in enumerate(data.sources)
        if any(word in reported_name(source).lower() for word in REPLAYED)
    ]
    share = sum(replayed) / sum(weights.values())
    if replayed and share < 0.01:
        yield f"`data.sources`: {100 * share:.1f} % is replayed; usual are 1 to 5 %, or 25 % ({REWARMING})"
    elif share > STRONG_REPLAY:
        yield f"`data.sources`: {100 * share:.0f} % is replayed, more than was ever tried (half, {REWARMING})"


def warmup(recipe: Recipe) -> Iterator[str]:
    schedule, total = recipe.schedule, recipe.budget.tokens
    share = schedule.options.get("warmup_share")
    length = share * (total or 1) if isinstance(share, float) else schedule.options.get("warmup_tokens", 0)
    if ":" in schedule.name or schedule.name == "continued" or not isinstance(length, int | float):
        return
    if not length:
        yield (
            "`schedule.warmup_tokens` is missing: the first steps at full rate make the loss jump. About 1 % of the"
            f" budget ({REWARMING})"
        )
    elif total is not None and length > MOST_WARMUP * total:
        key = f"`schedule.{'warmup_share' if share else 'warmup_tokens'}`"
        yield f"{key} is {100 * length / total:.0f} % of the budget: 0.5 to 2 % is usual ({REWARMING})"


def rows_and_batch(recipe: Recipe, longest: int | None) -> Iterator[str]:
    length, tokens = recipe.data.sequence_length, recipe.budget.global_batch_tokens
    if longest is not None and length > longest:
        yield (
            f"`data.sequence_length` is {length:,}, but the model's config names {longest:,} positions. Use the base's"
            " length unless long context is the aim"
        )
    base = known_base(recipe.model.path) if recipe.model.path else None
    if tokens is not None and base is not None and base.batch_tokens is not None and tokens > 2 * base.batch_tokens:
        yield (
            f"`budget.global_batch_tokens` is {tokens:,}, more than twice the base's own {base.batch_tokens:,}"
            f" ({base.source}): smaller steps, and more of them, learn more from as many tokens"
        )
