"""Two runs and more beside each other: exactly what differs, what they came to, and what could not be compared."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cpt.compare.costs import event_topic, progress_topic, speed_topic
from cpt.compare.curves import loss_topic
from cpt.compare.held_out import held_out_topic, task_topic
from cpt.compare.inputs import data_topic, model_topic, same_anyway, text_at
from cpt.compare.machines import code_topic, machine_topic, versions_topic
from cpt.compare.recipes import recipe_topic
from cpt.compare.record import Record, missing_parts, read_record, short_names
from cpt.compare.rows import Row, Topic
from cpt.runs.folder import METRICS

MOST_NAMED = 5  # in a title
WORTH_PROCESSES = 2**28  # bytes of metrics
NEXT_TOKEN = ("pretrain", "cpt")  # stages whose loss is that of the next token of all text
DECIDE_ABOUT_DATA = (
    "data.",
    "seed",
    "stage",
    "budget.",
    "model.path",
    "tokenizer.",
    "evaluation.held_out_share",
    "evaluation.perplexity",
)


@dataclass(frozen=True)
class Comparison:
    """All of it; the first run is the one that the others are compared with."""

    records: list[Record]
    differences: list[Topic]
    """Recipes, versions, code, machines, data, models: only rows that differ."""
    figures: list[Topic]
    not_compared: list[str]
    """What is missing, and why; a sentence each."""

    @property
    def names(self) -> list[str]:
        """Of the runs."""
        return [record.name for record in self.records]

    @property
    def title(self) -> str:
        """The names, as long as they are few."""
        return (
            " and ".join(self.names)
            if len(self.names) <= MOST_NAMED
            else f"{len(self.names)} runs beside {self.names[0]}"
        )

    @property
    def num_differences(self) -> int:
        """Rows that differ."""
        return sum(len(topic.rows) for topic in self.differences)

    def headline(self) -> str:
        """How many things differ, in one sentence."""
        runs = f"{len(self.records)} runs, beside {self.names[0]}"
        if not self.num_differences:
            return (
                f"{runs}: nothing differs in recipe, versions, code, machine, data, tokenizer and weights, as far as"
                " it is known."
            )
        counts = [f"{topic.title.lower()} {len(topic.rows)}" for topic in self.differences if topic.rows]
        return (
            f"{runs}: {self.num_differences} difference{'s' if self.num_differences > 1 else ''}"
            f" ({', '.join(counts)})."
        )

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "runs": [
                {"name": record.name, "folder": str(record.folder), "stage": record.stage, "state": record.state}
                for record in self.records
            ],
            "differences": [
                {"topic": topic.title, "name": row.name, "values": list(row.values)}
                for topic in self.differences
                for row in topic.rows
            ],
            "figures": [
                {"topic": topic.title, "name": row.name, "values": list(row.values), "numbers": list(row.numbers)}
                for topic in self.figures
                for row in topic.rows
            ],
            "remarks": [remark for topic in (*self.differences, *self.figures) for remark in topic.remarks],
            "not_compared": self.not_compared,
        }


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare runs as far as their folders tell.

    Args:
        folders: of two runs or more; the first is the one that the others are compared with.
    """
    records = read_records(folders)
    not_compared = [
        *given_twice(records),
        *still_going(records),
        *(sentence for record in records for sentence in missing_parts(record)),
    ]
    recipes = recipe_topic(records, same_anyway(records), not_compared)
    model = model_topic(records)
    differences = [
        recipes,
        versions_topic(records),
        code_topic(records),
        machine_topic(records),
        data_topic(records, any(row.name.startswith(DECIDE_ABOUT_DATA) for row in recipes.rows) or bool(model.rows)),
        model,
    ]
    figures = [
        progress_topic(records),
        loss_topic(records, comparable_losses(records, not_compared)),
        held_out_topic(records, not_compared),
        task_topic(records),
        speed_topic(records),
        event_topic(records),
    ]
    return Comparison(
        records,
        [topic for topic in differences if not topic.is_empty],
        [topic for topic in figures if not topic.is_empty],
        list(dict.fromkeys(not_compared)),
    )


def read_records(folders: Sequence[Path]) -> list[Record]:
    """Of all runs; many long ones by several processes, which share no interpreter."""
    names = short_names(list(folders))
    sizes = [path.stat().st_size for folder in folders if (path := folder / METRICS).is_file()]
    if sum(sizes) < WORTH_PROCESSES:
        return [read_record(folder, name) for folder, name in zip(folders, names, strict=True)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("fork")) as processes:
        return list(processes.map(read_record, folders, names))


def given_twice(records: Sequence[Record]) -> list[str]:
    """Runs that are one and the same folder."""
    seen: dict[Path, str] = {}
    sentences = []
    for record in records:
        first = seen.setdefault(record.folder.resolve(), record.name)
        if first != record.name:
            sentences.append(f"{record.name} is the very folder of {first}: it was given twice.")
    return sentences


def still_going(records: Sequence[Record]) -> list[str]:
    """Runs of which only a part is there."""
    sentences = []
    for record in records:
        step = record.metrics.last("step")
        so_far = f" at step {step:,.0f}" if step is not None else ""
        if record.state == "running":
            sentences.append(f"the end of {record.name}: it is still running{so_far}; its figures are those so far.")
        elif record.status and record.state != "finished":
            sentences.append(
                f"the end of {record.name}: its state is {record.state}{so_far}; its figures are those until then."
            )
        elif not record.status:
            sentences.append(f"the state of {record.name}: status.json is missing or cannot be read.")
    return sentences


def comparable_losses(records: Sequence[Record], not_compared: list[str]) -> list[bool]:
    """Which runs' losses mean the same as those of the first: the loss of each token of the same tokenizer, at the
    same task."""
    first = records[0]
    fits = []
    for record in records:
        stages = Row("", tuple("next token" if one.stage in NEXT_TOKEN else one.stage for one in (first, record)))
        tokenizers = Row("", tuple(text_at(one.inputs, "tokenizer", "xxh3") for one in (first, record)))
        if stages.differs:
            not_compared.append(
                f"training losses of {record.name}: its stage is {record.stage}, that of {first.name} is"
                f" {first.stage}."
            )
        if tokenizers.differs:
            not_compared.append(
                f"losses per token of {record.name}: its tokenizer is another than that of {first.name}. Bits per byte"
                " can be compared."
            )
        fits.append(not stages.differs and not tokenizers.differs)
    return fits
