"""Check names, options, files, packages, disk and DeepSpeed before anything is built."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from cpt.cache import hub_is_reachable
from cpt.checkpoints.retention import find_rule
from cpt.data.readers.account import format_account
from cpt.data.readers.columns import form_of_source, sections_of
from cpt.data.readers.shared_lines import shared_line_warnings
from cpt.data.readers.sources import kind_of, listing_once
from cpt.data.rows.contamination import small_sets
from cpt.data.rows.held_out import check_sizes
from cpt.data.rows.open_sources import check_sources, compare_sample, unchecked_sources
from cpt.data.store.tokenization import DocumentEncoder
from cpt.distributed import print_once, world_size
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.evaluation.paired import FEW, FEWEST, TOO_FEW
from cpt.evaluation.tasks import FEWEST_QUESTIONS, check_tasks
from cpt.hardware import (
    ask_triton,
    find_gpus,
    nearest_existing,
    require_programs,
    require_triton,
    torch_problem,
)
from cpt.models.adapters import check_lora_options, check_quantization
from cpt.models.build import DTYPES
from cpt.models.inventory import count_model_parameters, longest_row
from cpt.models.known_bases import KnownBase, known_base
from cpt.models.layers import check_compiling, has_experts, read_recomputing, wanted_compiling
from cpt.optim.build import (
    build_optimizer,
    check_optimizer,
    check_partitioned,
    check_release,
    check_rounding,
    find_optimizer,
)
from cpt.optim.schedules import SCHEDULES, build_schedule, phases_in_tokens
from cpt.planning.check_model import (
    check_architecture,
    check_conversations,
    check_model,
    check_teacher,
    check_tokenizer,
    is_there,
)
from cpt.planning.check_resources import PreflightReport, check_resources, placed
from cpt.planning.fitting import capability_of, with_chosen_values, with_placeholders
from cpt.planning.model_sizes import TEACHER
from cpt.planning.workload import WRONG_UNDER_AUTOCAST, is_wrong_under_autocast
from cpt.plugins import did_you_mean, find, with_key
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.keys import automatic_keys, micro_batches_per_step
from cpt.recipe.paths import result_of_run, unfinished_run
from cpt.recipe.rules import REWARDED, keyed_sources, reported_name
from cpt.recipe.schema import Data, Recipe
from cpt.recipe.tree import Node
from cpt.stages.models import check_reference
from cpt.stages.rewards import find_rewards
from cpt.training.callbacks import check_callbacks
from cpt.training.engine import check_parallelism
from cpt.training.engine_profiles import (
    Profile,
    changes_in_memory,
    check_fsdp,
    check_profile,
    offloads,
    profile_warnings,
    read_profile,
    zero_section,
)
from cpt.training.generations import check_generations
from cpt.training.loss_guard import check_loss_guard, find_handler
from cpt.training.restart import find_oom_handler

HIDDEN_GPUS = ("", "-1")  # by CUDA_VISIBLE_DEVICES
TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow", "comet_ml", "swanlab")
LEAST_LEARNING_RATE, HIGHEST_FOR_ADAMW = 1e-6, 1e-2
LORA_BAND = (1e-5, 5e-4)  # the sweep of arXiv 2405.09673
LARGEST_PEAKS = {
    1_000_000_000: (3e-3, "SmolLM 135M, huggingface/smollm"),
    None: (6e-4, "Falcon 7B, its card"),
}
MOST_WARMUP, STRONG_REPLAY = 0.1, 0.5
LONG_RUN = 10_000_000  # tokens
REWARMING = "arXiv 2403.08763"
REPLAYED = ("replay", "general")


def refuse_mistakes(
    recipe: Recipe, *, deepspeed: str | Profile | None = None, root: Node | None = None
) -> PreflightReport:
    """Raise the mistakes before the run costs anything; else return findings, with the plan for this machine's GPUs.

    Args:
        deepspeed: the active profile, if it comes from accelerate's config instead of the recipe.
        root: the recipe's tree (of `load_with_tree`), for the lines of mistakes.

    Raises:
        CptError: all mistakes together, in their class, or a RecipeError if their classes differ.
    """
    found = check_reality(recipe, deepspeed=deepspeed)
    if mistakes := [*found.mistakes, *found.blockers]:
        kinds = {type(mistake) for mistake in mistakes}
        kind = kinds.pop() if len(kinds) == 1 else RecipeError
        raise kind("\n".join(placed(str(mistake), root) for mistake in mistakes))
    return found


def report(path: Path, recipe: Recipe, root: Node | None = None) -> PreflightReport:
    if torch.cuda.is_available() and not recipe.training.get("use_cpu"):
        ask_triton()
    found = found_in(recipe)
    lines = list(map(format_account, found.accounts))
    lines += [f"warning: {placed(warning, root)}." for warning in found.warnings]
    for group, problems in {
        "error": found.mistakes,
        "blocker on this machine": found.blockers,
    }.items():
        lines += [
            f"{group}: {type(problem).__name__}: {placed(str(problem), root)}"
            for problem in problems
        ]
    lines += [f"not checked: {placed(unchecked, root)}" for unchecked in found.unchecked]
    counts = f"{len(found.mistakes)} error(s), {len(found.blockers)} blocker(s) on this machine"
    for line in lines:
        print_once(line)
    print_once(
        f"{path}: {counts}, {len(found.unchecked)} not checked."
        if found.exit_code
        else f"{path}: no mistakes."
    )
    return found


@listing_once()
def found_in(recipe: Recipe) -> PreflightReport:
    """Check a recipe with values in place of `auto`."""
    chosen, unchosen = recipe, None
    try:
        chosen = with_chosen_values(recipe)
    except CptError as problem:  # mostly about the model, which the gate checks separately
        chosen, unchosen = with_placeholders(recipe), problem
    found = check_reality(chosen)
    if not any(isinstance(mistake, DataError) for mistake in [*found.mistakes, *found.blockers]):
        # otherwise the same files would be reported twice
        sizes = found.run(check_sizes, *sections_of(chosen), few=FEW)
        if sizes is not None:
            found.accounts, warnings = sizes
            found.warnings += warnings
        found.warnings += found.run(shared_line_warnings, sections_of(chosen)[0]) or []
        compare_texts(chosen, found)
    if isinstance(unchosen, ResourceError):
        keys = ", ".join(f"`training.{key}: auto`" for key in automatic_keys(recipe.training))
        found.unchecked.append(
            f"{keys}: chosen at the start of the run, since the model's config cannot be read here"
        )
    elif unchosen is not None and not found.mistakes:
        found.mistakes.append(unchosen)
    return found


def compare_texts(recipe: Recipe, found: PreflightReport) -> None:
    """Check that the tokenizer, if it could be loaded here, gives a sample of each source back."""
    if found.tokenizer is None:
        return
    encoder = DocumentEncoder(found.tokenizer)
    data, evaluation = sections_of(recipe)
    for key, source in keyed_sources(data, evaluation):
        found.warnings += found.run(compare_sample, data, source, key, encoder) or []


def check_reality(recipe: Recipe, *, deepspeed: str | Profile | None = None) -> PreflightReport:
    """Check everything that the recipe refers to, in seconds, without a GPU; nothing is written."""
    found, training = PreflightReport(), recipe.training
    # a recipe in bf16 that is checked on a machine without a GPU
    elsewhere = bool(training.get("bf16")) and not torch.accelerator.is_available()
    has_gpu = elsewhere or torch.cuda.is_available()
    found.run(check_gpus, training)
    profile = found.run(check_deepspeed, recipe, deepspeed or training.get("deepspeed"), found)
    zero3 = profile is not None and zero_section(profile).get("stage") == 3
    check_names(recipe, found, profile, zero3=zero3)
    check_documents(recipe, found)
    found.mistakes += check_tasks(recipe.evaluation.tasks)
    check_packages(recipe, found, has_gpu=has_gpu)
    model = check_model(recipe, found)
    check_tokenizer(recipe, model, found)
    check_teacher(recipe, model, found)
    for number, reward in enumerate(recipe.rewards):
        path, revision = reward.options.get("path"), reward.options.get("revision")
        if reward.name == "reward_model" and isinstance(path, str):
            is_there(str(result_of_run(path)), revision, f"rewards[{number}].path", found)
    check_engine(recipe, profile, model, found, elsewhere=elsewhere)
    if world_size() > 1:  # before hours of tokenizing
        found.run(micro_batches_per_step, recipe, world_size())
    if recipe.stage in REWARDED:
        found.run(check_generations, recipe, world_size())
    parameters = None if model is None else count_model_parameters(model).total
    found.warnings += craft_warnings(
        recipe, parameters, None if model is None else longest_row(model.config)
    )
    if recipe.safety.max_gpu_memory is not None and (training.get("use_cpu") or not has_gpu):
        found.warnings.append("`safety.max_gpu_memory` has no effect on a CPU")
    if elsewhere and not training.get("use_cpu"):
        found.unchecked.append(
            "`training.bf16`: memory, without a GPU on this machine. `cpt plan RECIPE --gpu NAME` computes it"
        )
    has_disk = bool(found.run(probe, "output_dir", recipe.output_dir / recipe.name))
    if model is not None:
        check_resources(recipe, model.config, profile, found, has_disk=has_disk)
    expect_results_of_other_runs(recipe, found)
    return found


def setting_mistakes(recipe: Recipe, model: PreTrainedModel | None) -> set[str]:
    """Return the mistakes that `cpt check` finds in the settings on any machine; files are not read.

    Args:
        model: the recipe's, on the meta device; None if it cannot be built.
    """
    recipe, found = with_placeholders(recipe), PreflightReport()
    profile = found.run(check_deepspeed, recipe, recipe.training.get("deepspeed"), found)
    zero3 = profile is not None and zero_section(profile).get("stage") == 3
    check_names(recipe, found, profile, zero3=zero3)
    check_engine(recipe, profile, model, found, elsewhere=True)
    if model is not None:
        check_architecture(recipe, model, found)
    return set(map(str, found.mistakes))


def check_engine(
    recipe: Recipe,
    profile: Profile | None,
    model: PreTrainedModel | None,
    found: PreflightReport,
    *,
    elsewhere: bool,
) -> None:
    """Check recomputing, compiling and shared rows; `elsewhere`: the run is for another machine."""
    training = recipe.training
    zero3 = profile is not None and zero_section(profile).get("stage") == 3
    found.run(
        read_recomputing, training, zero3=zero3, experts=model is not None and has_experts(model)
    )
    even_rows = recipe.data.packing != "token_budget"
    found.run(check_compiling, training, zero3=zero3, even_rows=even_rows)
    if wanted_compiling(training) is not None and is_wrong_under_autocast(
        recipe, capability_of(None)
    ):
        found.warnings.append(f"`training.torch_compile`: {WRONG_UNDER_AUTOCAST}. Remove it")
    found.run(
        check_parallelism, recipe, profile, model, processes=world_size(), elsewhere=elsewhere
    )


def check_gpus(training: Mapping[str, Any]) -> None:
    """Refuse half precision, which is for a GPU, if torch cannot use this machine's: the run would be on the CPU."""
    is_for_gpu = training.get("bf16") or training.get("fp16") or torch.cuda.is_available()
    if (
        not is_for_gpu
        or training.get("use_cpu")
        or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN_GPUS
    ):
        return
    problem = torch_problem(find_gpus())
    if problem is not None:
        remedy = "`cpt doctor` has a remedy. To train on the CPU, write `training.use_cpu: true`"
        raise ResourceError(f"`training`: {problem}. {remedy}.")


def check_documents(recipe: Recipe, found: PreflightReport) -> None:
    kinds = {kind_of(source.path) for _, source in keyed_sources(recipe.data, recipe.evaluation)}
    ask_hub = "hub" in kinds and hub_is_reachable()
    found.unchecked += unchecked_sources(recipe.data, recipe.evaluation, ask_hub=ask_hub)
    sections = found.run(sections_of, recipe)
    complaints = [] if sections is None else check_sources(*sections, ask_hub=ask_hub)
    found.mistakes += [DataError(complaint) for complaint in complaints]
    if sections is None or complaints:
        return
    data, evaluation = sections
    found.run(check_conversations, data)
    # a model and its base are compared document by document
    for key, held_out, count in (
        found.run(lambda: list(small_sets(data, evaluation, FEWEST_QUESTIONS))) or ()
    ):
        holds = f"`{key}.path`: {held_out.path} has {count} document(s)"
        if count < FEWEST:
            needed = f"A model and its base are compared document by document: at least {FEWEST}, ideally {FEW}"
            remedy = "Add some, or make each line of a text a document: `text_documents: line`."
            found.mistakes.append(DataError(f"{holds}. {needed}. {remedy}"))
        elif (
            reported_name(held_out) not in recipe.evaluation.retain
            and not recipe.model.from_scratch
        ):
            needed = f"an interval needs {FEW} or more, and with fewer than {TOO_FEW} the verdict is always unknown"
            if form_of_source(held_out) == "document":
                needed += f"; the domain test needs {FEWEST_QUESTIONS}"
            found.warnings.append(f"{holds}: {needed}. The verdict is based on few documents")


def expect_results_of_other_runs(recipe: Recipe, found: PreflightReport) -> None:
    """Files missing under `output_dir` are blockers, not mistakes, if another run still has to make them."""
    documents = [source.path for source in (*recipe.data.sources, *recipe.evaluation.perplexity)]
    reward_models = [reward.options.get("path") for reward in recipe.rewards]
    read = [
        recipe.model.path,
        recipe.tokenizer.path,
        recipe.training.get(TEACHER),
        *reward_models,
        *documents,
    ]
    under = [
        path
        for path in read
        if isinstance(path, str) and path and recipe.output_dir in Path(path).parents
    ]
    awaited = [path for path in under if not Path(path).exists() or unfinished_run(path)]
    for mistake in list(found.mistakes):
        if any(path in str(mistake) for path in awaited):
            found.mistakes.remove(mistake)
            found.blockers.append(mistake)
    for unchecked in list(found.unchecked):
        # `output_dir` does not exist yet, so the path looks like a Hub id
        if any(f": {path} (" in unchecked for path in awaited):
            found.unchecked.remove(unchecked)
            found.blockers.append(
                DataError(f"{unchecked.rpartition(' (')[0]} does not exist yet. Make it first.")
            )


def check_names(
    recipe: Recipe, found: PreflightReport, profile: Profile | None, *, zero3: bool
) -> None:
    found.run(find_stage, recipe.stage)
    found.run(try_optimizer, recipe, profile)
    found.run(check_release, recipe, deepspeed=profile is not None)
    found.run(check_rounding, recipe)
    found.mistakes += [RecipeError(complaint) for complaint in found.run(check_fsdp, recipe) or ()]
    found.run(check_quantization, recipe.model.lora, zero3=zero3)
    found.run(check_lora_options, recipe.model.lora or {}, zero3=zero3)
    found.run(try_schedule, recipe)
    found.run(check_loss_guard, recipe.safety.loss_guard)
    if recipe.safety.on_spike is not None:
        found.run(find_handler, recipe.safety.on_spike)
    found.run(find_oom_handler, recipe.safety.on_oom)
    if recipe.checkpoints.kept is not None:
        found.run(find_rule, recipe.checkpoints.kept)
    if recipe.checkpoints.archive is not None:
        found.run(check_archive, recipe.checkpoints.archive)
    found.run(find_rewards, recipe.rewards)
    found.run(check_callbacks, recipe.monitoring.callbacks)
    found.run(check_reference, recipe)


def try_optimizer(recipe: Recipe, profile: Profile | None) -> None:
    """Build the optimizer for two layers; an offloading one must be compiled, so only check its options."""
    with_key("optimizer.name", lambda: find_optimizer(recipe.optimizer.name))
    check_optimizer(recipe.optimizer)
    offloaded = profile is not None and offloads(profile, "optimizer")
    if offloaded and recipe.optimizer.name == "adamw":
        check_partitioned(recipe.optimizer)
        return
    layers = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2, bias=False))
    if recipe.model.dtype != "auto" and recipe.model.lora is None:  # adapters are fp32
        layers.to(DTYPES[recipe.model.dtype])
    try:
        build_optimizer(
            recipe.optimizer,
            layers,
            offloaded=offloaded,
            partitioned=profile is not None,
            sharded=bool(recipe.training.get("fsdp")),
        )
    except (TypeError, ValueError, IndexError) as problem:
        raise RecipeError(
            f"`optimizer.name`: {recipe.optimizer.name} refuses its options: {problem}"
        ) from problem


def try_schedule(recipe: Recipe) -> None:
    with_key("schedule.name", lambda: find("schedule", recipe.schedule.name, SCHEDULES))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        build_schedule(
            recipe.schedule,
            optimizer,
            tokens_per_step=1,
            total_tokens=recipe.budget.tokens or 10**18,
        )
    except (TypeError, ValueError, ZeroDivisionError) as problem:
        raise RecipeError(
            f"`schedule.name`: {recipe.schedule.name} refuses its options: {problem}"
        ) from problem
    phases_in_tokens(recipe)


def check_packages(recipe: Recipe, found: PreflightReport, *, has_gpu: bool) -> None:
    for number, tracker in enumerate(recipe.monitoring.trackers):
        key = f"`monitoring.trackers[{number}]`"
        if tracker not in INTEGRATION_TO_CALLBACK:
            known = f"{did_you_mean(tracker, INTEGRATION_TO_CALLBACK)} Known: {', '.join(INTEGRATION_TO_CALLBACK)}."
            found.refuse(f"{key}: unknown tracker `{tracker}`.{known}")
        elif tracker in TRACKERS and importlib.util.find_spec(tracker) is None:
            missing = f"{key}: {tracker} is not installed. Install it: pip install {tracker}"
            found.blockers.append(ResourceError(missing))
    # `optimizer` and `torch_compile` are checked with their other requirements
    if recipe.training.get("use_liger_kernel"):
        found.run(
            require_triton,
            "`training.use_liger_kernel`",
            instead="`training.use_liger_kernel: false`",
        )
    if recipe.training.get("activation_offloading") and (
        recipe.training.get("use_cpu") or not has_gpu
    ):
        found.refuse("`training.activation_offloading` needs a GPU. Remove it.")
    if recipe.model.attention == "flex_attention":
        found.run(
            require_triton, "`model.attention`: flex_attention", instead="`model.attention: auto`"
        )
    # without a GPU, cpt's chunked loss replaces Liger's kernels
    if (
        recipe.training.get("use_liger_kernel")
        and has_gpu
        and importlib.util.find_spec("liger_kernel") is None
    ):
        missing = "`training.use_liger_kernel`: not installed. Install it: pip install liger-kernel"
        found.blockers.append(ResourceError(missing))


def check_deepspeed(
    recipe: Recipe, given: str | Profile | None, found: PreflightReport
) -> Profile | None:
    if not given:
        return None
    if not find_gpus():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # DeepSpeed detects its device when it is imported
    profile = read_profile(given)
    found.mistakes += [RecipeError(complaint) for complaint in check_profile(given, recipe)]
    found.warnings += [*changes_in_memory(given), *profile_warnings(given, recipe)]
    reason = (
        "`training.deepspeed`: offload_optimizer compiles its optimizer"
        if offloads(profile, "optimizer")
        else ""
    )
    if not torch.accelerator.is_available():
        reason = "`training.deepspeed`: DeepSpeed on a CPU compiles its communication"
    if reason:
        found.run(require_programs, "g++", "ninja", reason=reason)
    return profile


def probe(key: str, folder: Path) -> bool:
    """Test writing in the folder, or in its nearest existing parent."""
    existing = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError as problem:
        raise RecipeError(
            f"`{key}`: cannot write to {existing} ({problem.strerror}). Choose another."
        ) from problem


def check_archive(place: str) -> None:
    try:
        files, path = fsspec.core.url_to_fs(place)
    except ImportError as problem:
        raise ResourceError(
            f"`checkpoints.archive`: {place} needs a package: {problem}"
        ) from problem
    except ValueError as problem:
        raise RecipeError(f"`checkpoints.archive`: {place}: {problem}") from problem
    if isinstance(files, LocalFileSystem):
        probe("checkpoints.archive", Path(path))


def craft_warnings(recipe: Recipe, parameters: int | None, max_positions: int | None) -> list[str]:
    """List settings outside published ranges, with sources; `parameters` is None if only the Hub has the number."""
    rate, name = recipe.optimizer.learning_rate, recipe.optimizer.name
    if rate > HIGHEST_FOR_ADAMW and "adamw" in name.lower():
        return [
            f"`optimizer.learning_rate` is {rate:g}: {name} usually diverges at such rates. 1e-5 to 1e-3 is usual"
        ]
    if recipe.stage != "cpt":
        return []
    base = known_base(recipe.model.path) if recipe.model.path else None
    found = [*rate_warnings(recipe, parameters, base), *replay_warnings(recipe.data)]
    schedule, total = recipe.schedule, recipe.budget.tokens
    share = schedule.options.get("warmup_share")
    warmup = (
        share * (total or 1)
        if isinstance(share, float)
        else schedule.options.get("warmup_tokens", 0)
    )
    if (
        ":" not in schedule.name
        and schedule.name != "continued"
        and isinstance(warmup, int | float)
    ):
        if not warmup:
            found.append(
                "`schedule.warmup_tokens` is missing: the first steps at full rate cause a loss spike. About 1 % of"
                f" the budget ({REWARMING})"
            )
        elif total is not None and warmup > MOST_WARMUP * total:
            key = f"`schedule.{'warmup_share' if share else 'warmup_tokens'}`"
            found.append(
                f"{key} is {100 * warmup / total:.0f} % of the budget: 0.5 to 2 % is usual ({REWARMING})"
            )
    if (
        recipe.checkpoints.every_tokens is recipe.checkpoints.every_steps is None
        and (total or 0) >= LONG_RUN
    ):
        found.append(
            "`checkpoints` has no interval, so a crash loses the whole run: with `every_steps: 0.1` it saves ten times"
        )
    length, batch = recipe.data.sequence_length, recipe.budget.global_batch_tokens
    if max_positions is not None and length > max_positions:
        found.append(
            f"`data.sequence_length` is {length:,}, but the model's config has {max_positions:,} positions. Use the"
            " base's length unless you train for long context"
        )
    of_base = base.batch_tokens if base is not None else None
    if batch is not None and base is not None and of_base is not None and batch > 2 * of_base:
        found.append(
            f"`budget.global_batch_tokens` is {batch:,}, more than twice the base's {of_base:,}"
            f" ({base.source}): smaller and more steps learn more from the same tokens"
        )
    return found


def rate_warnings(recipe: Recipe, parameters: int | None, base: KnownBase | None) -> Iterator[str]:
    lora, rate = recipe.model.lora, recipe.optimizer.learning_rate
    key = f"`optimizer.learning_rate` is {rate:g}"
    low, high = LORA_BAND
    if lora is not None and not low <= rate <= high:
        yield f"{key}: LoRA was tested from {low:g} to {high:g}, and was best near the highest (arXiv 2405.09673)"
    if lora is None and rate < LEAST_LEARNING_RATE:
        yield f"{key}: such a low rate barely changes the weights; start near the base's last one ({REWARMING})"
    if lora is None and base is not None and base.peak_learning_rate is not None:
        if rate > base.peak_learning_rate:
            known = f"{base.peak_learning_rate:g} ({base.source})"
            yield f"{key}, above the peak of the base's pre-training, {known}: expect forgetting"
    elif lora is None and parameters is not None:
        peak, whose = next(
            peak for limit, peak in LARGEST_PEAKS.items() if limit is None or parameters < limit
        )
        if rate > peak:
            yield f"{key}, above the largest peak published for {parameters / 1e9:.2g}B parameters, {peak:g} ({whose})"
    # embeddings trained together with adapters need a lower rate
    of_embedding = recipe.optimizer.options.get("embedding_learning_rate")
    if isinstance(of_embedding, int | float):
        if of_embedding > rate:
            of_it = f"`optimizer.embedding_learning_rate` is {of_embedding:g}"
            yield f"{of_it}: 2 to 10 times below `learning_rate` is usual"
    elif lora is not None and lora.get("preset") == "cpt":
        yield (
            "`model.lora: cpt` trains embeddings and head at the adapters' learning rate: 2 to 10 times less is usual."
            f" Write `optimizer.embedding_learning_rate: {rate / 10:g}`"
        )


def replay_warnings(data: Data) -> Iterator[str]:
    """Warn of too little or too much replay; sources named replay or general count as replay."""
    if len(data.sources) == 1:
        yield (
            "`data.sources` has no replay, so the model will forget: replay 1 to 5 % of general text for a weak"
            f" shift, about 25 % for a strong one, such as another language ({REWARMING}). Ready-made sections:"
            " recipes/presets/replay/"
        )
    if data.phases or data.temperature is not None:
        return
    replays = [
        source
        for source in data.sources
        if any(word in reported_name(source).lower() for word in REPLAYED)
    ]
    share = sum(source.weight for source in replays) / sum(source.weight for source in data.sources)
    if replays and share < 0.01:
        yield f"`data.sources`: {100 * share:.1f} % is replayed; 1 to 5 %, or 25 %, is usual ({REWARMING})"
    elif share > STRONG_REPLAY:
        yield f"`data.sources`: {100 * share:.0f} % is replayed, more than was tested (half, {REWARMING})"
