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
from cpt.planning.model_sizes import JUDGE, TEACHER
from cpt.planning.workload import (
    WRONG_UNDER_AUTOCAST,
    computes_in_half,
    is_wrong_under_autocast,
)
from cpt.plugins import did_you_mean, find, with_key
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.keys import automatic_keys, micro_batches_per_step
from cpt.recipe.paths import result_of_run, unfinished_run
from cpt.recipe.rules import REWARDED, keyed_sources, reported_name
from cpt.recipe.schema import Data, DocumentSource, Recipe
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
LEAST_LEARNING_RATE = 1e-6
HIGHEST_FOR_ADAMW = 1e-2
LORA_BAND = (1e-5, 5e-4)  # the sweep of arXiv 2405.09673
LARGEST_PEAK_BELOW_1B = (3e-3, "SmolLM 135M, huggingface/smollm")
LARGEST_PEAK = (6e-4, "Falcon 7B, its card")
MOST_WARMUP = 0.1
STRONG_REPLAY = 0.5
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
    report = check_reality(recipe, deepspeed=deepspeed)
    mistakes = [*report.mistakes, *report.blockers]
    if mistakes:
        kinds = {type(mistake) for mistake in mistakes}
        kind = kinds.pop() if len(kinds) == 1 else RecipeError
        raise kind("\n".join(placed(str(mistake), root) for mistake in mistakes))
    return report


def print_report(path: Path, recipe: Recipe, root: Node | None = None) -> PreflightReport:
    if torch.cuda.is_available() and not recipe.training.get("use_cpu"):
        ask_triton()
    report = check_recipe(recipe)
    for account in report.accounts:
        print_once(format_account(account))
    for warning in report.warnings:
        print_once(f"warning: {placed(warning, root)}.")
    for mistake in report.mistakes:
        print_once(f"error: {type(mistake).__name__}: {placed(str(mistake), root)}")
    for blocker in report.blockers:
        problem = placed(str(blocker), root)
        print_once(f"blocker on this machine: {type(blocker).__name__}: {problem}")
    for unchecked in report.unchecked:
        print_once(f"not checked: {placed(unchecked, root)}")

    counts = "no mistakes"
    if report.exit_code:
        counts = (
            f"{len(report.mistakes)} error(s), {len(report.blockers)} blocker(s) on this machine"
        )
        counts += f", {len(report.unchecked)} not checked"
    print_once(f"{path}: {counts}.")
    return report


@listing_once()
def check_recipe(recipe: Recipe) -> PreflightReport:
    """Check a recipe with values in place of `auto`."""
    refusal = None
    try:
        filled = with_chosen_values(recipe)
    except CptError as problem:  # mostly about the model, which the gate checks separately
        filled = with_placeholders(recipe)
        refusal = problem
    report = check_reality(filled)

    problems = [*report.mistakes, *report.blockers]
    if not any(isinstance(problem, DataError) for problem in problems):
        # otherwise the same files would be reported twice
        sizes = report.run(check_sizes, *sections_of(filled), few=FEW)
        if sizes is not None:
            report.accounts, warnings = sizes
            report.warnings += warnings
        report.warnings += report.run(shared_line_warnings, sections_of(filled)[0]) or []
        compare_texts(filled, report)

    if isinstance(refusal, ResourceError):
        keys = ", ".join(f"`training.{key}: auto`" for key in automatic_keys(recipe.training))
        report.unchecked.append(
            f"{keys}: chosen at the start of the run, since the model's config cannot be read here"
        )
    elif refusal is not None and not report.mistakes:
        report.mistakes.append(refusal)
    return report


def compare_texts(recipe: Recipe, report: PreflightReport) -> None:
    """Check that the tokenizer, if it could be loaded here, gives a sample of each source back."""
    if report.tokenizer is None:
        return
    encoder = DocumentEncoder(report.tokenizer)
    data, evaluation = sections_of(recipe)
    for key, source in keyed_sources(data, evaluation):
        report.warnings += report.run(compare_sample, data, source, key, encoder) or []


def check_reality(recipe: Recipe, *, deepspeed: str | Profile | None = None) -> PreflightReport:
    """Check everything that the recipe refers to, in seconds, without a GPU; nothing is written."""
    report = PreflightReport()
    training = recipe.training
    use_cpu = bool(training.get("use_cpu"))
    # a recipe in bf16 that is checked on a machine without a GPU
    elsewhere = bool(training.get("bf16")) and not torch.accelerator.is_available()
    has_gpu = elsewhere or torch.cuda.is_available()

    report.run(check_gpus, training)
    profile = report.run(check_deepspeed, recipe, deepspeed or training.get("deepspeed"), report)
    check_names(recipe, report, profile)
    check_documents(recipe, report)
    report.mistakes += check_tasks(recipe.evaluation.tasks)
    check_packages(recipe, report, has_gpu=has_gpu)

    model = check_model(recipe, report)
    check_tokenizer(recipe, model, report)
    check_teacher(recipe, model, report)
    check_reward_models(recipe, report)

    check_engine(recipe, profile, model, report, elsewhere=elsewhere)
    if world_size() > 1:  # before hours of tokenizing
        report.run(micro_batches_per_step, recipe, world_size())
    if recipe.stage in REWARDED:
        report.run(check_generations, recipe, world_size())
    if model is None:
        report.warnings += craft_warnings(recipe, None, None)
    else:
        parameters = count_model_parameters(model).total
        report.warnings += craft_warnings(recipe, parameters, longest_row(model.config))
    if recipe.safety.max_gpu_memory is not None and (use_cpu or not has_gpu):
        report.warnings.append("`safety.max_gpu_memory` has no effect on a CPU")
    if elsewhere and not use_cpu:
        report.unchecked.append(
            "`training.bf16`: memory, without a GPU on this machine. `cpt plan RECIPE --gpu NAME` computes it"
        )

    has_disk = bool(report.run(probe, "output_dir", recipe.output_dir / recipe.name))
    if model is not None:
        check_resources(recipe, model.config, profile, report, has_disk=has_disk)
    expect_results_of_other_runs(recipe, report)
    return report


def setting_mistakes(recipe: Recipe, model: PreTrainedModel | None) -> set[str]:
    """Return the mistakes that `cpt check` finds in the settings on any machine; files are not read.

    Args:
        model: the recipe's, on the meta device; None if it cannot be built.
    """
    recipe = with_placeholders(recipe)
    report = PreflightReport()
    profile = report.run(check_deepspeed, recipe, recipe.training.get("deepspeed"), report)
    check_names(recipe, report, profile)
    check_engine(recipe, profile, model, report, elsewhere=True)
    if model is not None:
        check_architecture(recipe, model, report)
    return set(map(str, report.mistakes))


def check_engine(
    recipe: Recipe,
    profile: Profile | None,
    model: PreTrainedModel | None,
    report: PreflightReport,
    *,
    elsewhere: bool,
) -> None:
    """Check recomputing, compiling and shared rows; `elsewhere`: the run is for another machine."""
    training = recipe.training
    zero3 = is_zero3(profile)
    experts = model is not None and has_experts(model)
    report.run(read_recomputing, training, zero3=zero3, experts=experts)
    even_rows = recipe.data.packing != "token_budget"
    report.run(check_compiling, training, zero3=zero3, even_rows=even_rows)
    compiles = wanted_compiling(training) is not None
    if compiles and is_wrong_under_autocast(recipe, capability_of(None)):
        report.warnings.append(f"`training.torch_compile`: {WRONG_UNDER_AUTOCAST}. Remove it")
    report.run(
        check_parallelism, recipe, profile, model, processes=world_size(), elsewhere=elsewhere
    )


def is_zero3(profile: Profile | None) -> bool:
    return profile is not None and zero_section(profile).get("stage") == 3


def check_reward_models(recipe: Recipe, report: PreflightReport) -> None:
    for number, reward in enumerate(recipe.rewards):
        path = reward.options.get("path")
        if reward.name == JUDGE and isinstance(path, str):
            key = f"rewards[{number}].path"
            is_there(str(result_of_run(path)), reward.options.get("revision"), key, report)


def check_gpus(training: Mapping[str, Any]) -> None:
    """Refuse half precision, which is for a GPU, if torch cannot use this machine's: the run would be on the CPU."""
    is_for_gpu = computes_in_half(training) or torch.cuda.is_available()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN_GPUS
    if not is_for_gpu or training.get("use_cpu") or is_hidden:
        return
    problem = torch_problem(find_gpus())
    if problem is not None:
        remedy = "`cpt doctor` has a remedy. To train on the CPU, write `training.use_cpu: true`"
        raise ResourceError(f"`training`: {problem}. {remedy}.")


def check_documents(recipe: Recipe, report: PreflightReport) -> None:
    kinds = {kind_of(source.path) for _, source in keyed_sources(recipe.data, recipe.evaluation)}
    ask_hub = "hub" in kinds and hub_is_reachable()
    report.unchecked += unchecked_sources(recipe.data, recipe.evaluation, ask_hub=ask_hub)
    sections = report.run(sections_of, recipe)
    complaints = [] if sections is None else check_sources(*sections, ask_hub=ask_hub)
    report.mistakes += [DataError(complaint) for complaint in complaints]
    if sections is None or complaints:
        return
    data, evaluation = sections
    report.run(check_conversations, data)
    sets = report.run(lambda: list(small_sets(data, evaluation, FEWEST_QUESTIONS)))
    for key, held_out, count in sets or ():
        check_number_held_out(recipe, key, held_out, count, report)


def check_number_held_out(
    recipe: Recipe, key: str, held_out: DocumentSource, count: int, report: PreflightReport
) -> None:
    """A model and its base are compared document by document."""
    holds = f"`{key}.path`: {held_out.path} has {count} document(s)"
    if count < FEWEST:
        needed = f"A model and its base are compared document by document: at least {FEWEST}, ideally {FEW}"
        remedy = "Add some, or make each line of a text a document: `text_documents: line`."
        report.mistakes.append(DataError(f"{holds}. {needed}. {remedy}"))
        return
    if recipe.model.from_scratch or reported_name(held_out) in recipe.evaluation.retain:
        return
    needed = f"an interval needs {FEW} or more, and with fewer than {TOO_FEW} the verdict is always unknown"
    if form_of_source(held_out) == "document":
        needed += f"; the domain test needs {FEWEST_QUESTIONS}"
    report.warnings.append(f"{holds}: {needed}. The verdict is based on few documents")


def expect_results_of_other_runs(recipe: Recipe, report: PreflightReport) -> None:
    """Files missing under `output_dir` are blockers, not mistakes, if another run still has to make them."""
    paths = [
        recipe.model.path,
        recipe.tokenizer.path,
        recipe.training.get(TEACHER),
        *(reward.options.get("path") for reward in recipe.rewards),
        *(source.path for source in recipe.data.sources),
        *(source.path for source in recipe.evaluation.perplexity),
    ]
    awaited = [
        path
        for path in paths
        if isinstance(path, str) and path and is_result_to_come(path, recipe.output_dir)
    ]

    for mistake in list(report.mistakes):
        if any(path in str(mistake) for path in awaited):
            report.mistakes.remove(mistake)
            report.blockers.append(mistake)
    for unchecked in list(report.unchecked):
        # `output_dir` does not exist yet, so the path looks like a Hub id
        if any(f": {path} (" in unchecked for path in awaited):
            report.unchecked.remove(unchecked)
            report.blockers.append(
                DataError(f"{unchecked.rpartition(' (')[0]} does not exist yet. Make it first.")
            )


def is_result_to_come(path: str, output_dir: Path) -> bool:
    is_result = output_dir in Path(path).parents
    return is_result and (not Path(path).exists() or bool(unfinished_run(path)))


def check_names(recipe: Recipe, report: PreflightReport, profile: Profile | None) -> None:
    zero3 = is_zero3(profile)
    report.run(find_stage, recipe.stage)
    report.run(try_optimizer, recipe, profile)
    report.run(check_release, recipe, deepspeed=profile is not None)
    report.run(check_rounding, recipe)
    report.mistakes += [
        RecipeError(complaint) for complaint in report.run(check_fsdp, recipe) or ()
    ]
    report.run(check_quantization, recipe.model.lora, zero3=zero3)
    report.run(check_lora_options, recipe.model.lora or {}, zero3=zero3)
    report.run(try_schedule, recipe)
    report.run(check_loss_guard, recipe.safety.loss_guard)
    if recipe.safety.on_spike is not None:
        report.run(find_handler, recipe.safety.on_spike)
    report.run(find_oom_handler, recipe.safety.on_oom)
    if recipe.checkpoints.kept is not None:
        report.run(find_rule, recipe.checkpoints.kept)
    if recipe.checkpoints.archive is not None:
        report.run(check_archive, recipe.checkpoints.archive)
    report.run(find_rewards, recipe.rewards)
    report.run(check_callbacks, recipe.monitoring.callbacks)
    report.run(check_reference, recipe)


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


def check_packages(recipe: Recipe, report: PreflightReport, *, has_gpu: bool) -> None:
    for number, tracker in enumerate(recipe.monitoring.trackers):
        key = f"`monitoring.trackers[{number}]`"
        if tracker not in INTEGRATION_TO_CALLBACK:
            hint = did_you_mean(tracker, INTEGRATION_TO_CALLBACK)
            names = ", ".join(INTEGRATION_TO_CALLBACK)
            report.refuse(f"{key}: unknown tracker `{tracker}`.{hint} Known: {names}.")
        elif tracker in TRACKERS and importlib.util.find_spec(tracker) is None:
            missing = f"{key}: {tracker} is not installed. Install it: pip install {tracker}"
            report.blockers.append(ResourceError(missing))
    training = recipe.training
    # `optimizer` and `torch_compile` are checked with their other requirements
    if training.get("use_liger_kernel"):
        key = "`training.use_liger_kernel`"
        report.run(require_triton, key, instead="`training.use_liger_kernel: false`")
        # without a GPU, cpt's chunked loss replaces Liger's kernels
        if has_gpu and importlib.util.find_spec("liger_kernel") is None:
            missing = f"{key}: not installed. Install it: pip install liger-kernel"
            report.blockers.append(ResourceError(missing))
    if training.get("activation_offloading") and (training.get("use_cpu") or not has_gpu):
        report.refuse("`training.activation_offloading` needs a GPU. Remove it.")
    if recipe.model.attention == "flex_attention":
        key = "`model.attention`: flex_attention"
        report.run(require_triton, key, instead="`model.attention: auto`")


def check_deepspeed(
    recipe: Recipe, engine: str | Profile | None, report: PreflightReport
) -> Profile | None:
    if not engine:
        return None
    if not find_gpus():
        # DeepSpeed detects its device when it is imported
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    profile = read_profile(engine)
    report.mistakes += [RecipeError(complaint) for complaint in check_profile(engine, recipe)]
    report.warnings += [*changes_in_memory(engine), *profile_warnings(engine, recipe)]
    reason = ""
    if not torch.accelerator.is_available():
        reason = "DeepSpeed on a CPU compiles its communication"
    elif offloads(profile, "optimizer"):
        reason = "offload_optimizer compiles its optimizer"
    if reason:
        report.run(require_programs, "g++", "ninja", reason=f"`training.deepspeed`: {reason}")
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


def check_archive(url: str) -> None:
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as problem:
        raise ResourceError(f"`checkpoints.archive`: {url} needs a package: {problem}") from problem
    except ValueError as problem:
        raise RecipeError(f"`checkpoints.archive`: {url}: {problem}") from problem
    if isinstance(files, LocalFileSystem):
        probe("checkpoints.archive", Path(path))


def craft_warnings(recipe: Recipe, parameters: int | None, max_positions: int | None) -> list[str]:
    """List settings outside published ranges, with sources; `parameters` is None if only the Hub has the number."""
    rate = recipe.optimizer.learning_rate
    name = recipe.optimizer.name
    if rate > HIGHEST_FOR_ADAMW and "adamw" in name.lower():
        return [
            f"`optimizer.learning_rate` is {rate:g}: {name} usually diverges at such rates. 1e-5 to 1e-3 is usual"
        ]
    if recipe.stage != "cpt":
        return []
    base = known_base(recipe.model.path) if recipe.model.path else None
    return [
        *rate_warnings(recipe, parameters, base),
        *replay_warnings(recipe.data),
        *warmup_warnings(recipe),
        *size_warnings(recipe, base, max_positions),
    ]


def warmup_warnings(recipe: Recipe) -> Iterator[str]:
    schedule, total = recipe.schedule, recipe.budget.tokens
    if ":" in schedule.name or schedule.name == "continued":
        return
    share = schedule.options.get("warmup_share")
    warmup = schedule.options.get("warmup_tokens", 0)
    if isinstance(share, float):
        warmup = share * (total or 1)
    if not isinstance(warmup, int | float):
        return
    if not warmup:
        yield (
            "`schedule.warmup_tokens` is missing: the first steps at full rate cause a loss spike. About 1 % of"
            f" the budget ({REWARMING})"
        )
    elif total is not None and warmup > MOST_WARMUP * total:
        key = "warmup_share" if share else "warmup_tokens"
        percent = f"{100 * warmup / total:.0f} %"
        yield f"`schedule.{key}` is {percent} of the budget: 0.5 to 2 % is usual ({REWARMING})"


def size_warnings(
    recipe: Recipe, base: KnownBase | None, max_positions: int | None
) -> Iterator[str]:
    """Warn of a long run without checkpoints, of long rows, and of large batches."""
    checkpoints, budget = recipe.checkpoints, recipe.budget
    has_interval = checkpoints.every_tokens is not None or checkpoints.every_steps is not None
    if not has_interval and (budget.tokens or 0) >= LONG_RUN:
        yield (
            "`checkpoints` has no interval, so a crash loses the whole run: with `every_steps: 0.1` it saves ten times"
        )
    length = recipe.data.sequence_length
    if max_positions is not None and length > max_positions:
        yield (
            f"`data.sequence_length` is {length:,}, but the model's config has {max_positions:,} positions. Use the"
            " base's length unless you train for long context"
        )
    batch = budget.global_batch_tokens
    if batch is None or base is None or base.batch_tokens is None:
        return
    if batch > 2 * base.batch_tokens:
        yield (
            f"`budget.global_batch_tokens` is {batch:,}, more than twice the base's {base.batch_tokens:,}"
            f" ({base.source}): smaller and more steps learn more from the same tokens"
        )


def rate_warnings(recipe: Recipe, parameters: int | None, base: KnownBase | None) -> Iterator[str]:
    lora = recipe.model.lora
    rate = recipe.optimizer.learning_rate
    key = f"`optimizer.learning_rate` is {rate:g}"
    low, high = LORA_BAND
    if lora is not None and not low <= rate <= high:
        yield f"{key}: LoRA was tested from {low:g} to {high:g}, and was best near the highest (arXiv 2405.09673)"
    if lora is None and rate < LEAST_LEARNING_RATE:
        yield f"{key}: such a low rate barely changes the weights; start near the base's last one ({REWARMING})"
    if lora is None and base is not None and base.peak_learning_rate is not None:
        if rate > base.peak_learning_rate:
            peak = f"{base.peak_learning_rate:g} ({base.source})"
            yield f"{key}, above the peak of the base's pre-training, {peak}: expect forgetting"
    elif lora is None and parameters is not None:
        peak_rate, source = LARGEST_PEAK if parameters >= 1e9 else LARGEST_PEAK_BELOW_1B
        if rate > peak_rate:
            size = f"{parameters / 1e9:.2g}B parameters"
            yield f"{key}, above the largest peak published for {size}, {peak_rate:g} ({source})"

    # embeddings trained together with adapters need a lower rate
    embedding_rate = recipe.optimizer.options.get("embedding_learning_rate")
    if isinstance(embedding_rate, int | float):
        if embedding_rate > rate:
            key = f"`optimizer.embedding_learning_rate` is {embedding_rate:g}"
            yield f"{key}: 2 to 10 times below `learning_rate` is usual"
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
    replayed = 0.0
    for source in data.sources:
        name = reported_name(source).lower()
        if any(word in name for word in REPLAYED):
            replayed += source.weight
    share = replayed / sum(source.weight for source in data.sources)
    if 0 < share < 0.01:
        yield f"`data.sources`: {100 * share:.1f} % is replayed; 1 to 5 %, or 25 %, is usual ({REWARMING})"
    elif share > STRONG_REPLAY:
        yield f"`data.sources`: {100 * share:.0f} % is replayed, more than was tested (half, {REWARMING})"
