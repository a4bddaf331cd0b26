"""Build a torch optimizer over the model's parameter groups from the recipe's `optimizer:` section."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from cpt.distributed import is_main_process, world_size
from cpt.errors import RecipeError, ResourceError, install_line
from cpt.hardware import announce_compiling, require_triton
from cpt.optim.adamw import OneKernelAdamW, adamw, fused_by_torch, trains_half
from cpt.optim.bnb import BLOCK, bnb_adamw, bnb_ademamix, bnb_lion, bnb_rmsprop, named
from cpt.optim.evaluation_point import refuse_shards
from cpt.optim.groups import MATRICES, ParameterGroups, parameter_groups
from cpt.plugins import check_options, find
from cpt.recipe.keys import accumulation
from cpt.recipe.schema import Optimizer, Recipe

log = logging.getLogger("cpt")
WHOLE = "an update needs the whole gradient"


def build_optimizer(
    section: Optimizer,
    model: nn.Module,
    *,
    offloaded: bool = False,
    partitioned: bool = False,
    sharded: bool = False,
    decay_by_role: bool = True,
) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names.

    Args:
        offloaded: DeepSpeed keeps the optimizer's states in host memory, where only its own AdamW works by default.
        partitioned: DeepSpeed's ZeRO gives the optimizer flat slices of parameters instead of matrices.
        sharded: FSDP gives it shards of parameters.
        decay_by_role: see `parameter_groups`.
    """
    check_optimizer(section)
    build = find_optimizer(section.name)
    facts = facts_of(section.name)
    if partitioned:
        check_partitioned(section)
    if offloaded and section.name != "adamw":
        raise RecipeError(
            f"`optimizer.name`: DeepSpeed cannot offload `{section.name}`. Use adamw."
        )
    if partitioned and section.name == "adamw":
        of_engine = offloaded_adamw if offloaded else fused_by_torch
        build = partial(adamw, of_engine=of_engine)
    options = dict(section.options)
    options.pop("release_gradients", None)
    groups = parameter_groups(
        model,
        embedding_learning_rate=options.pop("embedding_learning_rate", None),
        matrices_apart=facts.matrices_apart,
        embeddings_apart=facts.embeddings_apart,
        by_role=decay_by_role,
    )
    if not facts.keeps_master_weights and not partitioned and trains_half(groups):
        log.warning(
            f"optimizer.name: {section.name} keeps no fp32 copy of weights in half precision. Use adamw."
        )
    optimizer: torch.optim.Optimizer = build(groups, section.learning_rate, **options)
    if partitioned or sharded:
        refuse_shards(optimizer, section.name)
    if isinstance(optimizer, OneKernelAdamW):
        instead = "`optimizer.name: adamw` and `model.dtype: auto`"
        require_triton(f"`optimizer.name`: {section.name} for these weights", instead=instead)
    return optimizer


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return a function of groups, learning rate and options, also if the name is that of a class."""
    if name not in BUILDERS:
        refuse_names_of_others(name)
    builder: Any = find("optimizer", name, BUILDERS)
    if isinstance(builder, type) and issubclass(builder, torch.optim.Optimizer):
        return builder_of_class(builder)
    return builder  # type: ignore[no-any-return]


def refuse_names_of_others(name: str) -> None:
    """Refuse torch's names, and transformers' names of schedule-free optimizers, with what to write instead."""
    for class_name, torch_class in vars(torch.optim).items():
        if isinstance(torch_class, type) and class_name.lower() == name.replace("_", "").lower():
            raise RecipeError(
                f"`{name}` is not built in. Write `torch.optim:{class_name}`, with its constructor's options."
            )
    if name.startswith("schedule_free_"):
        suffix = "".join(OF_SCHEDULE_FREE.get(part, part) for part in name.split("_")[2:])
        raise RecipeError(
            f"`{name}` is not built in. Write `pytorch_optimizer:ScheduleFree{suffix}`"
            f" ({install_line('optimizers')}), and `schedule: constant`."
        )


def builder_of_class(
    optimizer_class: type[torch.optim.Optimizer],
) -> Callable[..., torch.optim.Optimizer]:
    """Return a function with the signature that `check_options` reads: options of the class, by keyword."""
    construct: Callable[..., torch.optim.Optimizer] = optimizer_class

    def build(
        groups: list[dict[str, Any]], learning_rate: float, **options: Any
    ) -> torch.optim.Optimizer:
        for name, value in options.items():
            if isinstance(value, list):
                options[name] = tuple(value)
        return construct(groups, lr=learning_rate, **options)

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, positional) for name in ("groups", "learning_rate")]
    signature = inspect.signature(optimizer_class.__init__)
    for name, parameter in signature.parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and name not in ("self", "params", "lr"):
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=parameter.empty)
            )
    build.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    build.__name__ = optimizer_class.__name__
    build.__annotations__ = {}
    return build


def check_optimizer(section: Optimizer) -> None:
    check_options(find_optimizer(section.name), section.options, "optimizer", also=FOR_ALL)


def check_partitioned(section: Optimizer) -> None:
    """Refuse options that do not work on slices of parameters, whose fp32 copies DeepSpeed keeps."""
    if section.name == "muon":
        raise RecipeError(
            "`optimizer.name`: DeepSpeed's Muon clips updates, not gradients"
            " (github.com/deepspeedai/DeepSpeed/issues/8439). Use adamw, or no DeepSpeed."
        )
    if facts_of(section.name).needs_whole_parameters:
        raise RecipeError(
            f"`optimizer.name`: `{section.name}` needs whole parameters. Use adamw, or no DeepSpeed."
        )
    if section.options.get("rounding") is not None:
        raise RecipeError(
            "`optimizer.rounding`: DeepSpeed keeps fp32 weights, which need no rounding. Remove it."
        )


def check_rounding(recipe: Recipe) -> None:
    rounding = recipe.optimizer.options.get("rounding")
    model = recipe.model
    if rounding is None:
        return
    if model.lora is not None:
        raise RecipeError(
            "`optimizer.rounding` has no effect: adapters are always fp32. Remove it."
        )
    if model.dtype != "bfloat16" and recipe.training.get("deepspeed") is None:
        raise RecipeError(
            "`optimizer.rounding` needs bfloat16 weights. Write `model.dtype: bfloat16`, or remove it."
        )


def sgd(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent, optionally with momentum."""
    return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two torch optimizers that share its groups and states, so that it is saved and scheduled as one."""

    def __init__(
        self, groups: ParameterGroups, *, muon: dict[str, Any], adamw: dict[str, Any]
    ) -> None:
        for group in groups:
            options = muon if group[MATRICES] else adamw
            for name, value in options.items():
                group.setdefault(name, value)
        super().__init__(groups, {})
        self.parts: list[torch.optim.Optimizer] = []
        matrices = [group for group in self.param_groups if group[MATRICES]]
        if matrices:
            self.parts.append(torch.optim.Muon(matrices))
        other_groups = [group for group in self.param_groups if not group[MATRICES]]
        if other_groups:
            self.parts.append(torch.optim.AdamW(other_groups))
        self.share()

    def share(self) -> None:
        """Give both parts the current groups and states, which are new objects after loading."""
        for part in self.parts:
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if group[MATRICES] is is_muon]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share()


def muon(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Muon (K. Jordan et al., 2024) by torch, with its rate scaled to AdamW's update size (arXiv 2502.16982), so that
    both share one learning rate.

    Args:
        momentum: for Muon.
        ns_steps: Newton-Schulz iterations.
        betas: for AdamW, which updates embeddings, head, norms and biases.
    """
    of_muon = {
        "lr": learning_rate,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "adjust_lr_fn": "match_rms_adamw",
    }
    of_adamw = {
        "lr": learning_rate,
        "weight_decay": weight_decay,
        "betas": (betas[0], betas[1]),
        "eps": eps,
        "fused": True,
    }
    return cast(torch.optim.Optimizer, MuonWithAdamW(groups, muon=of_muon, adamw=of_adamw))


def soap(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.95, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10_000,
) -> torch.optim.Optimizer:
    """SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

    Args:
        precondition_frequency: steps between updates of the eigenbasis.
        max_precondition_dim: longer sides get no preconditioner.
    """
    options = {
        "precondition_frequency": precondition_frequency,
        "max_precondition_dim": max_precondition_dim,
    }
    return from_pytorch_optimizer(
        "SOAP", groups, learning_rate, betas, weight_decay=weight_decay, eps=eps, **options
    )


def shampoo(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    preconditioning_compute_steps: int = 10,
    block_size: int = 512,
) -> torch.optim.Optimizer:
    """Shampoo in blocks (arXiv 2002.09018).

    Args:
        preconditioning_compute_steps: steps between updates of the preconditioners' roots.
        block_size: matrices are split into squares of this size, each with its preconditioners.
    """
    options = {
        "preconditioning_compute_steps": preconditioning_compute_steps,
        "block_size": block_size,
    }
    decay = {"weight_decay": weight_decay, "decoupled_weight_decay": True}
    return from_pytorch_optimizer(
        "ScalableShampoo", groups, learning_rate, betas, **decay, **options
    )


def from_pytorch_optimizer(
    name: str, groups: ParameterGroups, learning_rate: float, betas: Sequence[float], **options: Any
) -> torch.optim.Optimizer:
    try:
        import pytorch_optimizer  # type: ignore[import-not-found, unused-ignore]  # an extra
    except ImportError as problem:
        raise ResourceError(
            f"`optimizer.name`: install {name}: {install_line('optimizers')}"
        ) from problem
    optimizer_class: Any = vars(pytorch_optimizer)[name]
    optimizer: torch.optim.Optimizer = optimizer_class(
        groups, lr=learning_rate, betas=(betas[0], betas[1]), **options
    )
    return optimizer


def offloaded_adamw(groups: ParameterGroups, **options: Any) -> torch.optim.Optimizer:
    """AdamW by DeepSpeed's kernel for the host's processor."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # needs a compiler, so only imported if used

    if is_main_process():
        announce_compiling("cpu_adam", "DeepSpeed compiles its optimizer for the host")
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)  # type: ignore[no-any-return]
    except RuntimeError as problem:
        raise ResourceError(
            f"DeepSpeed's CPU AdamW needs g++: {problem.__cause__ or problem}"
        ) from problem


def convert_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Continue with states of torch's AdamW in DeepSpeed's for the host, or the reverse, which differ in options and
    step counters, but not in moments; return whether the other one wrote them."""
    on_host = "bias_correction" in optimizer.defaults  # an option of DeepSpeed's
    if ("bias_correction" in optimizer.param_groups[0]) == on_host:
        return False
    for group in optimizer.param_groups:
        group.pop("bias_correction", None)
        saved = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        group |= {**optimizer.defaults, **saved}
    for parameter, state in optimizer.state.items():
        step = torch.tensor(float(state["step"]), device=parameter.device)
        state["step"] = int(step) if on_host else step
    return True


def replay_step_counter(optimizer: torch.optim.Optimizer) -> None:
    """Make DeepSpeed's CPU kernel, which does not store its count, resume bit for bit. It updates beta^t by
    multiplication at each step, but uses pow() in the first step after a load, which differs in the last bit.
    Replaying the steps on a parameter of one element restores the product exactly."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    steps = max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    weight, gradient, exp_avg, exp_avg_sq = (torch.zeros(1) for _ in range(4))
    for step in range(1, steps + 1):
        settings = (optimizer.opt_id, step, group["lr"], beta1, beta2, group["eps"], 0.0, True)
        optimizer.ds_opt_adam.adam_update(*settings, weight, gradient, exp_avg, exp_avg_sq)


@dataclass(frozen=True)
class OptimizerFacts:
    """What cpt knows about a built-in optimizer; `UNKNOWN` for others."""

    build: Callable[..., torch.optim.Optimizer]
    """A function of groups, learning rate and options."""
    needs_whole_parameters: bool = False
    """An update needs a parameter as the model has it: no slices of ZeRO, no shards of FSDP."""
    matrices_apart: bool = False
    """Matrices of the hidden layers are in groups of their own."""
    embeddings_apart: bool = False
    """Embeddings are in groups of their own, with states in full precision."""
    releases_gradients: bool = False
    """The update of a parameter needs no other parameter, so it can happen in the backward pass."""
    keeps_master_weights: bool = False
    """Weights in half precision have an fp32 copy, or are rounded so that none is needed."""
    moments: int | None = None
    """Numbers that it keeps for each weight; None: unknown, so memory is planned as for AdamW."""
    moment_bytes: float | None = None
    """Of each moment, with its share of a block's scale; None: the weight's."""
    pages_states: bool = False
    """States are in host memory, and come to the GPU for the update."""

    @property
    def quantizes_moments(self) -> bool:
        return self.moment_bytes is not None and self.moment_bytes < FP32_BYTES


FP32_BYTES = 4
ADAMW = OptimizerFacts(
    adamw, releases_gradients=True, keeps_master_weights=True, moments=2, moment_bytes=FP32_BYTES
)


# transformers' names of bitsandbytes' optimizers
BNB_ADAMW = ("adamw_8bit", "paged_adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit")
BNB_ADEMAMIX = ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit")
BNB_LION = ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit")
BNB_RMSPROP = ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")


def facts_of_bnb(
    build: Callable[..., torch.optim.Optimizer], names: Sequence[str], moments: int
) -> Iterator[tuple[str, OptimizerFacts]]:
    for name in names:
        in_8_bit = name.endswith("8bit")
        yield (
            name,
            OptimizerFacts(
                named(build, name),
                needs_whole_parameters=True,
                embeddings_apart=in_8_bit,
                releases_gradients=True,
                keeps_master_weights=names is BNB_ADAMW,
                moments=moments,
                moment_bytes=1 + FP32_BYTES / BLOCK if in_8_bit else FP32_BYTES,
                pages_states=name.startswith("paged"),
            ),
        )


OPTIMIZERS = {
    "adamw": ADAMW,
    **dict(facts_of_bnb(bnb_adamw, BNB_ADAMW, 2)),
    **dict(facts_of_bnb(bnb_ademamix, BNB_ADEMAMIX, 3)),
    **dict(facts_of_bnb(bnb_lion, BNB_LION, 1)),
    **dict(facts_of_bnb(bnb_rmsprop, BNB_RMSPROP, 1)),
    "sgd": OptimizerFacts(sgd, moments=0),
    "muon": OptimizerFacts(muon, needs_whole_parameters=True, matrices_apart=True),
    "soap": OptimizerFacts(soap, needs_whole_parameters=True),
    "shampoo": OptimizerFacts(shampoo, needs_whole_parameters=True),
}
UNKNOWN = OptimizerFacts(torch.optim.Optimizer)  # a user's own, which is found by its name
BUILDERS = {name: facts.build for name, facts in OPTIMIZERS.items()}
OF_SCHEDULE_FREE = {"adamw": "AdamW", "radam": "RAdam", "sgd": "SGD"}  # transformers' names
FOR_ALL: dict[str, Any] = {"embedding_learning_rate": float | None, "release_gradients": bool}
"""Options of every optimizer, including custom ones."""


def facts_of(name: str) -> OptimizerFacts:
    return OPTIMIZERS.get(name, UNKNOWN)


# --- released gradients ---


def releases_gradients(recipe: Recipe) -> bool:
    return bool(recipe.optimizer.options.get("release_gradients", False))


def check_release(recipe: Recipe, *, deepspeed: bool, processes: int | None = None) -> None:
    """Refuse settings that need the whole gradient. `processes` defaults to the running ones."""
    if not releases_gradients(recipe):
        return
    reason = why_not_released(recipe, deepspeed=deepspeed, processes=processes or world_size())
    if reason is not None:
        raise RecipeError(f"`optimizer.release_gradients`: {reason}")


def why_not_released(recipe: Recipe, *, deepspeed: bool, processes: int) -> str | None:
    """Return what needs the whole gradient, and what to write instead; None if nothing does."""
    name = recipe.optimizer.name
    training = recipe.training
    if not facts_of(name).releases_gradients:
        return f"{WHOLE} with `{name}`. Use adamw or paged_adamw_8bit, or write false."
    if deepspeed:
        return "DeepSpeed manages the gradients. Write false, or remove `training.deepspeed`."
    if processes > 1:
        return f"it supports one GPU, not {processes}. Write false, and use DeepSpeed's ZeRO-2."
    if training.get("fp16"):
        return f"{WHOLE} to find the scale of fp16. Write `training.bf16: true` instead."
    if training.get("max_grad_norm", 1.0):
        return "the norm is only known after the updates, too late for clipping. Write `training.max_grad_norm: 0`."
    steps = accumulation(recipe)
    if steps != 1:
        key = "training.gradient_accumulation_steps"
        if recipe.budget.global_batch_tokens is not None:
            key = "budget.global_batch_tokens"
        return f"`{key}` means {steps} micro-batches per step. Write `training.gradient_accumulation_steps: 1`."
    return None
