"""Show a plan: two tables that add up, the time, a verdict, and what would make it fit."""

from collections.abc import Iterator

from cpt.planning.advice import USABLE, USABLE_OF_HOST, Proposal, gpu_room, host_room, host_that_is_needed
from cpt.planning.facts import ModelFacts
from cpt.planning.memory import SAMPLING, MemoryPlan
from cpt.planning.setup import Setup
from cpt.planning.speed import Speed
from cpt.planning.target import Target
from cpt.planning.terms import GIB, Moment
from cpt.recipe.values import in_yaml


def format_setup(facts: ModelFacts, setup: Setup, target: Target) -> str:
    """What is planned, in one sentence."""
    trained = "all trained" if setup.lora is None else f"{facts.trained / 1e6:,.0f}M of them trained, in adapters"
    where = f"{setup.gpus} x {target.name}" + (f" in {setup.nodes} machines" if setup.nodes > 1 else "")
    if target.on_cpu:
        where = f"{setup.gpus} process{'es' if setup.gpus > 1 else ''} on the CPU"
    pairs = f" ({setup.micro_batch} pairs)" if setup.beside.sequences > 1 else ""
    at_once = f"{setup.sequences} x {setup.length:,} tokens at once{pairs}, {setup.tokens_per_step:,} in a step"
    what = f"{facts.parameters / 1e9:.3g}B parameters ({facts.name}), {trained}"
    return f"{what}; {format_zero(setup)}; {at_once}; {where}."


def format_zero(setup: Setup) -> str:
    if setup.zero is None:
        return "no ZeRO"
    if setup.zero.is_fsdp:
        return "FSDP2"
    parts = {"the optimizer": setup.zero.offload_optimizer, "the weights": setup.zero.offload_parameters}
    on_host = " and ".join(part for part, there in parts.items() if there)
    return f"ZeRO-{setup.zero.stage}" + (f" with {on_host} on the host" if on_host else "")


def format_plan(plan: MemoryPlan, setup: Setup, target: Target, share: float = 1.0) -> Iterator[str]:
    """The tables, and what they leave out."""
    usable = USABLE_OF_HOST if target.on_cpu else USABLE
    who, of = ("the machine", "all processes") if target.on_cpu else (target.name, "each GPU")
    yield from table(f"Memory of {of}, at its peak ({plan.peak.name}):", plan.peak)
    yield format_room(who, gpu_room(plan, target, share), target.memory_gib, usable * share, plan.peak.size)
    if not target.on_cpu:
        yield ""
        yield from table("Memory of the host:" if setup.nodes == 1 else "Memory of each machine's host:", plan.host)
        if target.host_is_known:
            who, room = f"the host ({target.host_source})", host_room(plan, target)
            yield format_room(who, room, target.host_memory_gib, USABLE_OF_HOST, plan.host.size)
        else:
            yield f"  Takes a host with {host_that_is_needed(plan):.0f} GiB; set yours with --host-memory."
    if not plan.is_counted:
        yield "  The activations are estimated: this architecture's code cannot be run without values."
    beside = setup.beside
    if beside.reference and setup.lora is None:
        divided = "" if setup.zero is not None and setup.zero.stage == 3 else ", and ZeRO-3 divides it over GPUs"
        yield f"  With an adapter (`model.lora`) no reference model is needed{divided}."
    if plan.peak.name == SAMPLING:
        fewer = "`training.steps_per_generation`, or shorter ones: `max_completion_length`"
        fewer = "`max_new_tokens`" if beside.stage == "gkd" else fewer
        yield f"  Sampling takes the most: {setup.sampled} completions at once. To have fewer: {fewer}."
    if beside.uncounted:
        yield f"  Not counted: {'; '.join(beside.uncounted)}."


def table(title: str, moment: Moment) -> Iterator[str]:
    yield f"{title:<48}{'GiB':>8}"
    for term in moment.terms:
        yield f"  {term.name:<46}{term.size / GIB:>8.2f}  {term.note}".rstrip()
    yield f"  {'sum':<46}{moment.size / GIB:>8.2f}"


def format_room(who: str, room: float, memory: float, usable: float, size: float) -> str:
    there = f"{usable * memory:.1f} GiB of {memory:.4g} that a run can have on {who}"
    if room < 0:
        return f"  Does not fit: {-room / GIB:.1f} GiB more than the {there}."
    return f"  Fits in the {there}: {size / GIB / (usable * memory):.0%} used."


def format_speed(
    speed: Speed, tokens: int | None, target: Target, setup: Setup, price: float | None, *, is_measured: bool
) -> Iterator[str]:
    text = f"Speed: {speed.tokens_per_second:,.0f} tokens a second ({speed.source})"
    if tokens is None:
        yield f"{text}. The budget is in epochs: `cpt mixture` counts the tokens."
    else:
        hours = speed.hours(tokens)
        time = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"
        money = "" if price is None else f", {hours * max(1, target.gpus) * price:,.0f} at {price:g} per GPU hour"
        yield f"{text}: {time} for {tokens:,} tokens{money}, without evaluation and saving."
        if speed.waits:
            yield f"  {speed.waits}."
    if setup.sampled and not is_measured:
        yield "  Sampling and judging completions are not planned; --measured RUN includes them."


def format_proposal(proposal: Proposal, target: Target) -> Iterator[str]:
    """What would make it fit, and the other kinds of ways."""
    which = "cheapest" if all(proposal.slower <= other.slower for other in proposal.others) else "nearest"
    yield f"The {which} change that makes it fit{kind_of_way(proposal) if proposal.others else ''}:"
    yield from format_changes(proposal, target)
    for other in proposal.others:
        yield f"Another way that fits{kind_of_way(other)}:"
        yield from format_changes(other, target)


def kind_of_way(proposal: Proposal) -> str:
    if "model.lora" in proposal.changes:
        return ", adapters"
    return (
        ", the optimizer on the host"
        if proposal.setup.zero is not None
        else ", all parameters with a smaller optimizer"
    )


def format_changes(proposal: Proposal, target: Target) -> Iterator[str]:
    for key, value in proposal.changes.items():
        yield f"  {key}: {in_yaml(value)}"
    host = "" if target.on_cpu else f", {proposal.plan.host.size / GIB:.0f} GiB on the host"
    longer = proposal.slower - 1
    time = f"about {abs(longer):.0%} {'more' if longer > 0 else 'less'} time than"
    if longer >= 1:
        time = f"about {proposal.slower:.1f} times the time of"
    elif abs(longer) < 0.005:
        time = "as much time as"
    yield f"  Then {proposal.plan.peak.size / GIB:.1f} GiB on each GPU{host}, {time} the recipe if it fitted."
    if "model.dtype" in proposal.changes:
        yield "  Each update rounds the weights to bfloat16, with no copy in fp32; see docs/optimizers.md."
    if proposal.setup.releases:
        tokens = f"{proposal.setup.tokens_per_step:,}"
        yield f"  A step is one micro-batch of {tokens} tokens, and gradients are not clipped by their norm."
