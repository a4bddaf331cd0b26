"""`python -m benchmarks.plan.published`: runs whose speed was published beside what `cpt plan` says of them, into
docs/planning.md.

Each run is planned twice: with the share of the peak that `cpt plan` assumes of itself, and with the one that the
run's authors give. The second tells the planner's own error apart from that of the assumption: in operations of a
token, in what goes over the links.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from benchmarks.marked import with_part
from benchmarks.plan.published_runs import SPEEDS, WHOLE, Run
from cpt.models.config import config_from
from cpt.planner.facts import ModelFacts, facts_of
from cpt.planner.setup import Setup, Zero
from cpt.planner.speed import ASSUMED_MFU, Speed, planned_speed
from cpt.planner.target import find_target

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
BEGIN, END = (
    "<!-- python -m benchmarks.plan.published: begin -->\n",
    "<!-- python -m benchmarks.plan.published: end -->\n",
)
GPUS = 8  # of each machine
HEADS = ("run", "on", "published", f"planned at {ASSUMED_MFU:.0%}", "their share", "planned at it", "waiting")


def main() -> None:
    """Plan them all, and write the part."""
    planned_part = part()
    PAGE.write_text(with_part(PAGE.read_text(), BEGIN, END, planned_part, "docs/planning.md"))


def planned(run: Run, mfu: float) -> Speed:
    """Of all its GPUs, with ZeRO-3, which is what FSDP does."""
    gpus = GPUS * run.nodes
    facts = facts_of_shape(json.dumps(run.config), run.length)
    zero = Zero(3, prefetch_bucket=facts.largest_layer, max_reuse_distance=2 * facts.largest_layer)
    setup = Setup(
        gpus=gpus,
        nodes=run.nodes,
        on_cpu=False,
        micro_batch=run.micro_batch,
        sequence_length=run.length,
        accumulation=run.accumulation,
        half=True,
        weights_bytes=2,
        checkpointing=run.checkpointing,
        fused_loss=False,
        packed=False,
        attention="sdpa",
        optimizer="adamw",
        lora=None,
        zero=zero,
    )
    target = find_target(run.gpu, gpus, 1024.0, nodes=run.nodes, links=run.links)
    return planned_speed(facts, setup, replace(target, links=None) if run.is_split_otherwise else target, mfu)


@lru_cache
def facts_of_shape(config: str, length: int) -> ModelFacts:
    """Counted once for all runs of a shape."""
    return facts_of(config_from(json.loads(config)), None, length)


def error(run: Run, mfu: float) -> float:
    """How much faster the plan is than the run was; negative: slower."""
    return planned(run, mfu).tokens_per_second / (GPUS * run.nodes) / run.rate - 1


def part() -> str:
    """Two tables, and what they come to."""
    lines = ["Tokens a second of each GPU, as measured over some steps:", "", *table(SPEEDS), ""]
    lines += [
        "By the GPU hours of whole runs, with evaluation, restarts and what was lost in them:",
        "",
        *table(WHOLE),
        "",
    ]
    known = [error(run, run.utilization) for run in (*SPEEDS, *WHOLE) if run.utilization is not None]
    assumed = [error(run, ASSUMED_MFU) for run in (*SPEEDS, *WHOLE)]
    lines.append(f"{told(known, 'At the share that the authors give')} {told(assumed, f'At {ASSUMED_MFU:.0%}')}")
    return "\n".join([*lines, "", *sources()]) + "\n"


def told(errors: Sequence[float], which: str) -> str:
    """Median and range."""
    size = statistics.median(abs(each) for each in errors)
    return (
        f"{which}, the plan is off by {size:.0%} in the median, between {min(errors):+.0%} and {max(errors):+.0%}"
        f" ({len(errors)} runs)."
    )


def table(runs: Sequence[Run]) -> list[str]:
    """One row for each."""
    lines = ["| " + " | ".join(HEADS) + " |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for run in runs:
        at_assumed = planned(run, ASSUMED_MFU)
        each = at_assumed.tokens_per_second / (GPUS * run.nodes)
        where = f"{GPUS * run.nodes:,} x {run.gpu}" if run.is_number_given else run.gpu
        cells = [run.name, where, f"{run.rate:,.0f}", f"{each:,.0f} ({each / run.rate - 1:+.0%})"]
        if run.utilization is None:
            cells += ["", ""]
        else:
            own = planned(run, run.utilization).tokens_per_second / (GPUS * run.nodes)
            cells += [f"{run.utilization:.0%}", f"{own:,.0f} ({own / run.rate - 1:+.0%})"]
        waits = f"{1 - at_assumed.efficiency:.0%}" if run.is_number_given and not run.is_split_otherwise else ""
        lines.append("| " + " | ".join([*cells, waits]) + " |")
    return lines


def sources() -> list[str]:
    """Where the figures stand, each place once."""
    places: dict[str, list[str]] = {}
    for run in (*SPEEDS, *WHOLE):
        places.setdefault(run.source, []).append(run.name)
    return [
        f"* {', '.join(dict.fromkeys(name for name in names if not name.startswith('the same')))}: {place}"
        for place, names in places.items()
    ]


if __name__ == "__main__":
    main()
