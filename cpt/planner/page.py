"""A plan as people read it: two tables that add up, the time, and a verdict."""

from collections.abc import Iterator

from cpt.planner.advice import USABLE, USABLE_OF_HOST, Proposal, gpu_room, host_room, host_that_is_needed
from cpt.planner.facts import ModelFacts
from cpt.planner.memory import MemoryPlan
from cpt.planner.setup import Setup
from cpt.planner.speed import Speed
from cpt.planner.stage_terms import SAMPLING
from cpt.planner.stages import KINDS
from cpt.planner.target import Target
from cpt.planner.terms import GIB, Moment
from cpt.recipe.words import in_yaml


def told_setup(facts: ModelFacts, setup: Setup, target: Target) -> str:
    """What is planned, in a sentence."""
    trained = "all trained" if setup.lora is None else f"{facts.trained / 1e6:,.0f}M of them trained, in adapters"
    where = (
        f"{setup.gpus} x {target.name}{told_machines(setup)}"
        if not target.on_cpu
        else f"{setup.gpus} process{'es' if setup.gpus > 1 else ''} on the CPU"
    )
    return (
        f"{facts.parameters / 1e9:.3g}B parameters ({facts.name}), {trained}; {told_zero(setup)}; {told_rows(setup)};"
        f" {where}."
    )


def told_machines(setup: Setup) -> str:
    """In how many."""
    return f" in {setup.nodes} machines" if setup.nodes > 1 else ""


def told_rows(setup: Setup) -> str:
    """What goes through the model at once, and what makes a step."""
    rows, length, written = setup.micro_batch, setup.sequence_length, setup.beside.completion
    if setup.beside.sequences > 1:
        at_once = f"{rows} x {setup.beside.sequences} x {length:,} tokens at once (a pair has two answers)"
    elif written:
        at_once = (
            f"{rows} x {setup.length:,} tokens at once (prompts of up to {length:,} and completions of up to"
            f" {written:,})"
        )
    else:
        at_once = f"{rows} x {length:,} tokens at once"
    by_budget = " as the budget counts them" if setup.tokens_at_once != rows * length else ""
    return f"{at_once}, {setup.tokens_per_step:,} in a step{by_budget}"


def told_zero(setup: Setup) -> str:
    """Where the states are."""
    if setup.zero is None:
        return "no ZeRO"
    if setup.zero.is_fsdp:
        return "FSDP2"
    parts = {"the optimizer": setup.zero.offload_optimizer, "the weights": setup.zero.offload_parameters}
    on_host = " and ".join(part for part, there in parts.items() if there)
    return f"ZeRO-{setup.zero.stage}" + (f" with {on_host} on the host" if on_host else "")


def table(title: str, moment: Moment) -> Iterator[str]:
    """Parts and their sum, in GiB; what rounds to nothing is in the sum of the rest."""
    yield f"{title:<48}{'GiB':>8}"
    for term in moment.terms:
        yield f"  {term.name:<46}{term.size / GIB:>8.2f}  {term.note}".rstrip()
    yield f"  {'sum':<46}{moment.size / GIB:>8.2f}"


def told_plan(plan: MemoryPlan, setup: Setup, target: Target, share: float = 1.0) -> Iterator[str]:
    """The tables and the verdict."""
    if target.on_cpu:
        yield from table(f"Memory of all processes, at {plan.peak.name}:", plan.peak)
        yield told_room(
            "the machine", gpu_room(plan, target, share), target.memory_gib, USABLE_OF_HOST * share, plan.peak.size
        )
    else:
        yield from table(f"Memory of each GPU, at its peak ({plan.peak.name}):", plan.peak)
        yield told_room(target.name, gpu_room(plan, target, share), target.memory_gib, USABLE * share, plan.peak.size)
        yield ""
        yield from table("Memory of the host:" if setup.nodes == 1 else "Memory of each machine's host:", plan.host)
        if target.host_is_known:
            room = host_room(plan, target)
            yield told_room(
                f"the host ({target.host_source})", room, target.host_memory_gib, USABLE_OF_HOST, plan.host.size
            )
        else:
            yield f"  Takes a host with {host_that_is_needed(plan):.0f} GiB; --host-memory says what yours has."
    if not plan.is_counted:
        yield "  The activations are estimated: this architecture's code cannot be run without values."
    yield from told_beside(plan, setup)


def told_room(who: str, room: float, memory: float, usable: float, size: float) -> str:
    """How much is left, or missing."""
    there = f"{usable * memory:.1f} GiB of {memory:.4g} that a run can have on {who}"
    if room < 0:
        return f"  Does not fit: {-room / GIB:.1f} GiB more than the {there}."
    return f"  Fits in the {there}: {size / GIB / (usable * memory):.0%} used."


def told_speed(speed: Speed, tokens: int | None, target: Target, gpus: int, price: float | None) -> Iterator[str]:
    """Time and money."""
    told = f"Speed: {speed.tokens_per_second:,.0f} tokens a second ({speed.source})"
    if tokens is None:
        yield f"{told}. The budget is in epochs: `cpt mixture` counts the tokens."
        return
    hours = speed.hours(tokens)
    time = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"
    money = "" if price is None else f", {hours * max(1, target.gpus) * price:,.0f} at {price:g} per GPU hour"
    yield f"{told}: {time} for {tokens:,} tokens{money}. Evaluation and saving come on top."
    if speed.waits:
        yield f"  {speed.waits[0].upper()}{speed.waits[1:]}."


def told_beside(plan: MemoryPlan, setup: Setup) -> Iterator[str]:
    """What the stage has besides and how it can be made less, and what the tables and the speed leave out."""
    beside = setup.beside
    if beside.reference and setup.lora is None:
        divided = "" if setup.zero is not None and setup.zero.stage == 3 else ", and ZeRO-3 divides it over GPUs"
        yield (
            "  With an adapter (`model.lora`) there is no reference model, since the model without it is"
            f" one{divided}."
        )
    if plan.peak.name == SAMPLING:
        fewer = (
            "`max_new_tokens`"
            if beside.stage == "gkd"
            else "`training.steps_per_generation`, or shorter ones: `max_completion_length`"
        )
        yield f"  Sampling takes the most: {setup.sampled} completions at once. To have fewer: {fewer}."
    if beside.uncounted:
        yield f"  Not counted: {'; '.join(beside.uncounted)}."
    if beside.judges:
        yield "  What reward models compute with is not counted, only their weights."


def told_time_beside(setup: Setup, *, is_planned: bool) -> Iterator[str]:
    """What a speed by plan leaves out; one that was measured leaves out nothing."""
    if not is_planned:
        return
    if setup.sampled:
        yield (
            "  That is the training alone: sampling completions and judging them are not planned. --measured RUN knows"
            " their time too."
        )
    elif setup.beside.stage in KINDS:
        yield "  Each example counts as full; shorter ones take less time."


def told_proposal(proposal: Proposal, target: Target) -> Iterator[str]:
    """What would make it fit, and the other kinds of ways that would."""
    which = "cheapest" if all(proposal.slower <= other.slower for other in proposal.others) else "nearest"
    yield f"The {which} change that makes it fit{what_it_is(proposal) if proposal.others else ''}:"
    yield from told_changes(proposal, target)
    for other in proposal.others:
        yield f"Another way that fits{what_it_is(other)}:"
        yield from told_changes(other, target)


def what_it_is(proposal: Proposal) -> str:
    """Which kind of a way, where there are several."""
    if "model.lora" in proposal.changes:
        return ", adapters"
    return (
        ", the optimizer on the host"
        if proposal.setup.zero is not None
        else ", all parameters with smaller states of the optimizer"
    )


def told_times(slower: float) -> str:
    """How much more or less time, to be followed by what it is compared with."""
    if slower >= 2:
        return f"about {slower:.1f} times the time that"
    longer = slower - 1
    return (
        "as much time as"
        if abs(longer) < 0.005
        else f"about {abs(longer):.0%} {'more' if longer > 0 else 'less'} time than"
    )


def told_changes(proposal: Proposal, target: Target) -> Iterator[str]:
    """What to write, and what comes of it."""
    for key, value in proposal.changes.items():
        yield f"  {key}: {in_yaml(value)}"
    host = "" if target.on_cpu else f", {proposal.plan.host.size / GIB:.0f} GiB on the host"
    time = f"{told_times(proposal.slower)} the recipe's own way would take if it fitted"
    yield f"  Then {proposal.plan.peak.size / GIB:.1f} GiB on each GPU{host}, {time}."
    if "model.dtype" in proposal.changes:
        yield (
            "  The weights are rounded to bfloat16 in each update, with no copy in fp32; docs/optimizers.md says what"
            " that means."
        )
    if proposal.setup.releases:
        yield (
            f"  A step is one micro-batch of {proposal.setup.tokens_per_step:,} tokens, and gradients are not clipped"
            " by their norm."
        )
