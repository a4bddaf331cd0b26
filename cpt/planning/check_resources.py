"""The report of checks before a run, with exit code and lines; and the check of memory and disk."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cpt.cache import size_of
from cpt.data.readers.account import Account
from cpt.distributed import world_size
from cpt.errors import CptError, RecipeError, ResourceError
from cpt.formatting import format_bytes
from cpt.hardware import GIB, find_gpus, free_disk_gib, free_host_memory_gib
from cpt.optim.build import facts_of
from cpt.planning.activations import count_activations
from cpt.planning.fitting import fits, nodes_here, this_machine
from cpt.planning.memory import MemoryPlan, plan_memory, sizes_for_stage
from cpt.planning.memory_parts import checkpoint_bytes
from cpt.planning.model_sizes import ModelSizes
from cpt.planning.speed import Target, assumed_mfu, planned_speed
from cpt.planning.workload import Setup, attention_on_gpu, read_setup
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node, position_of
from cpt.training.engine_profiles import Profile

MISTAKES = 2
NOT_READY = 3  # a blocker on this machine, or an incomplete check
FIELDS = "|".join(Recipe.model_fields)
STEP = r"(?:\.\w+|\[\d+\])"
KEY = re.compile(rf"`(?:{FIELDS}){STEP}*`|\b(?:{FIELDS}){STEP}+")  # `stage`, or model.path
LAST = 3  # for the rule `newest`


@dataclass
class PreflightReport:
    mistakes: list[CptError] = field(default_factory=list)
    """Errors on any machine: in the recipe, or in its files."""
    blockers: list[CptError] = field(default_factory=list)
    """Blockers on this machine: a missing package, too little disk, a run that has to finish first."""
    unchecked: list[str] = field(default_factory=list)
    """Conditions of the run that cannot be checked here."""
    warnings: list[str] = field(default_factory=list)
    """Settings outside published ranges."""
    accounts: list[Account] = field(default_factory=list)
    """The contents of the sources that are quick to read."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """None if it cannot be loaded here."""
    plan: dict[str, Any] | None = None
    """Planned memory and speed on the GPUs of this machine."""

    @property
    def exit_code(self) -> int:
        if self.mistakes:
            return MISTAKES
        return NOT_READY if self.blockers or self.unchecked else 0

    def refuse(self, message: str) -> None:
        self.mistakes.append(RecipeError(message))

    def run(self, check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the check's result; on an error add a mistake, or a blocker of this machine, and return None."""
        try:
            return check(*arguments, **options)
        except CptError as problem:
            group = self.blockers if isinstance(problem, ResourceError) else self.mistakes
            if str(problem) not in map(str, group):  # two checks may read the same file
                group.append(problem)
            return None


def placed(message: str, root: Node | None) -> str:
    key = KEY.search(message)
    if root is None or key is None:
        return message
    steps = re.findall(r"\w+", key.group())
    location = tuple(int(step) if step.isdigit() else step for step in steps)
    position = position_of(root, location)
    return message if message.startswith(f"{position.file}:") else f"{position}: {message}"


@dataclass(frozen=True)
class DiskNeeds:
    """Lower bound of a run's peak disk usage, in bytes."""

    checkpoint: float
    export: float
    checkpoints_at_once: int

    @property
    def total(self) -> float:
        return self.checkpoints_at_once * self.checkpoint + self.export


def disk_needs(recipe: Recipe, sizes: ModelSizes, setup: Setup) -> DiskNeeds:
    model_bytes = float(setup.weights_bytes * sizes.parameters)
    weights_bytes = model_bytes
    if setup.lora is not None:
        weights_bytes = float(setup.weights_bytes * sizes.trained)
    saved_bytes = weights_bytes  # without states of unknown size
    if facts_of(setup.optimizer).moments is not None:
        saved_bytes = checkpoint_bytes(sizes, setup)
    if setup.zero is not None and not setup.zero.is_fsdp:
        saved_bytes += weights_bytes  # DeepSpeed saves the weights again with its states
    return DiskNeeds(saved_bytes, model_bytes, checkpoints_at_once(recipe))


def checkpoints_at_once(recipe: Recipe) -> int:
    """Number of checkpoints on disk while another is written, from the recipe."""
    saves = number_of_saves(recipe)
    rule = recipe.checkpoints.kept
    if rule is None:
        return 1 if saves == math.inf else int(saves)
    saved = rule.options.get("last", LAST) if rule.name == "newest" else 1
    return int(min(saves, saved + 1))


def number_of_saves(recipe: Recipe) -> float:
    """Checkpoints of the whole run; infinite if the recipe does not set its length."""
    section, budget = recipe.checkpoints, recipe.budget
    if section.every_tokens is None and section.every_steps is None:
        return 1
    if section.every_steps is not None and section.every_steps < 1:
        return math.ceil(1 / section.every_steps)
    tokens_between = section.every_tokens
    if not tokens_between:
        tokens_between = int(section.every_steps or 1) * (budget.global_batch_tokens or 0)
    if budget.tokens is None or not tokens_between:
        return math.inf
    return math.ceil(budget.tokens / tokens_between)


def check_disk(recipe: Recipe, needs: DiskNeeds, freed: int = 0) -> None:
    folder = recipe.output_dir / recipe.name
    used = 0  # by checkpoints of this run, which it overwrites
    for pattern in ("checkpoint-*", "final"):
        used += sum(size_of(path) for path in folder.glob(pattern))
    free = free_disk_gib(folder) * GIB + used + freed
    if needs.total <= free:
        return

    count = needs.checkpoints_at_once
    checkpoints = "checkpoint" if count == 1 else "checkpoints"
    remedy = "Free some, or choose another disk"
    if count > 2:
        remedy += ", or lower `checkpoints.keep`"
    raise ResourceError(
        f"`output_dir`: {recipe.output_dir} has {format_bytes(free)} free, but the run needs about"
        f" {format_bytes(needs.total)}: {count} {checkpoints} of"
        f" {format_bytes(needs.checkpoint)}, one of them being written, and the model. {remedy}."
    )


def check_resources(
    recipe: Recipe,
    config: PreTrainedConfig,
    profile: Profile | None,
    report: PreflightReport,
    *,
    has_disk: bool = True,
) -> None:
    """Compare the run with this machine's GPUs, and its disk if `has_disk`; add the plan to `report`."""
    gpus = [] if recipe.training.get("use_cpu") else find_gpus()
    nodes = nodes_here()
    try:
        attention = attention_on_gpu(recipe, config)
        setup = read_setup(
            recipe, world_size(), profile, attention=attention, on_cpu=not gpus, nodes=nodes
        )
        sizes = sizes_for_stage(config, setup)
        if has_disk:
            report.run(check_disk, recipe, disk_needs(recipe, sizes, setup))
        if not gpus:
            return
        activations = count_activations(config, setup)
    except CptError:  # such as a missing teacher, reported by another check
        return
    except Exception as problem:  # from custom model code: an estimate must not stop a run
        reason = f"({type(problem).__name__}: {problem})"
        report.unchecked.append(f"`model`: memory is unknown {reason}. `cpt rehearse` measures it")
        return

    target = this_machine(world_size(), on_cpu=False, gpus=gpus)
    share = target.usable_share(recipe.safety.max_gpu_memory)
    plan = plan_memory(sizes, setup, activations, snapshot=recipe.checkpoints.in_background)
    mfu = assumed_mfu(setup)
    report.plan = {
        "gpu": target.name,
        "gpus": target.gpus,
        "nodes": nodes,
        "gpu_has_gib": round(target.memory_gib, 2),
        "gpu_usable_share": share,
        "moment": plan.peak.name,
        "gpu_memory_gib": {term.name: round(term.size / GIB, 4) for term in plan.peak.terms},
        "gpu_total_gib": round(plan.peak.size / GIB, 3),
        "host_total_gib": round(plan.host.size / GIB, 3),
        "tokens_per_second": round(planned_speed(sizes, setup, target, mfu).tokens_per_second, 1),
        "assumed_mfu": mfu,
    }

    report.run(check_pinned, plan)
    if not fits(plan, target, share):
        report.warnings.append(lack_of_memory(plan, target, share))


def check_pinned(plan: MemoryPlan) -> None:
    pinned_gib = sum(term.size for term in plan.host.terms if "pinned" in term.note) / GIB
    free_gib = free_host_memory_gib()
    if pinned_gib > free_gib:
        raise ResourceError(
            f"`training`: the run pins {pinned_gib:.0f} GiB of host memory, and {free_gib:.0f} are free."
            " Free some, or use a plan without them: `cpt plan`."
        )


def lack_of_memory(plan: MemoryPlan, target: Target, share: float) -> str:
    gpu = f"{plan.peak.size / GIB:.1f} GiB of a {target.name} with {target.memory_gib:.0f}"
    if share < 1:
        gpu += f", of which `safety.max_gpu_memory` allows {share * target.memory_gib:.0f}"
    host = f"{plan.host.size / GIB:.0f} GiB of a host with {target.host_memory_gib:.0f}"
    return f"`training`: the plan needs {gpu}, and {host}. `cpt plan` shows the parts, and changes that fit"
