"""Real runs of `train()` on a labelled GPU, with the host's waits of a step.

python tests/emulated/labelled_runs.py    writes the table of waits into docs/reference/training.md
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/training.md"
BEGIN, END = "<!-- waits: begin -->", "<!-- waits: end -->"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

from cuda_stand_ins import emulated_cuda, process_group  # noqa: E402
from emulated_gpu import Wait  # noqa: E402
from labelled_devices import OneDevicePerOperation  # noqa: E402
from tiny import TINY_LLAMA, write_documents, write_recipe  # noqa: E402

from cpt.contrib.tokenizers.train_bpe import train_bpe  # noqa: E402
from cpt.recipe.load import load_recipe  # noqa: E402
from cpt.train import train  # noqa: E402
from cpt.training.trainer import CPTTrainer  # noqa: E402

MICRO_BATCHES = 3
COUNTED_STEP = 4  # of 5: states exist, and neither the log nor the save at the end is due


def zero(stage: int, *, optimizer: bool = False, parameters: bool = False) -> dict[str, Any]:
    """`training` of a run with DeepSpeed; on the host: `optimizer`, `parameters`."""
    section: dict[str, Any] = {"stage": stage}
    on_host = {"device": "cpu", "pin_memory": True}
    if optimizer:
        section["offload_optimizer"] = on_host
    if parameters:
        section["offload_param"] = on_host
    by_trainer = (
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    )
    profile = dict.fromkeys((*by_trainer, "gradient_clipping"), "auto")
    return {"deepspeed": {**profile, "bf16": {"enabled": "auto"}, "zero_optimization": section}}


ENGINES: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {},
    "FSDP2": {"fsdp": True},
    "ZeRO-1": zero(1),
    "ZeRO-2": zero(2),
    "ZeRO-3": zero(3),
    "ZeRO-2, optimizer on the host": zero(2, optimizer=True),
    "ZeRO-3, optimizer on the host": zero(3, optimizer=True),
    "ZeRO-3, optimizer and weights on the host": zero(3, optimizer=True, parameters=True),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw, fp32 weights": {"name": "adamw"},
    "adamw, bf16 weights": {"name": "adamw"},
    "adamw, bf16 weights, stochastic rounding": {"name": "adamw", "rounding": "stochastic"},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd"},
}


@dataclass
class LabelledRun:
    """Tells the emulated GPU which step and which micro-batch runs, so that each wait is counted for it."""

    operations: OneDevicePerOperation
    trainer: Any = None
    micro_batches: int = 0
    watch: Callable[[CPTTrainer], None] | None = None

    def attach(self, trainer: CPTTrainer) -> None:
        self.trainer = trainer
        gpu, step_of_trainer, begin = (
            self.operations.gpu,
            trainer.training_step,
            trainer.checked_step.begin,
        )

        def training_step(*arguments: Any, **options: Any) -> Any:
            gpu.micro_batch = self.micro_batches
            self.micro_batches += 1
            try:
                return step_of_trainer(*arguments, **options)
            finally:
                gpu.micro_batch = None

        def begin_step() -> None:
            gpu.step += 1
            self.micro_batches = 0
            begin()

        trainer.training_step = training_step  # type: ignore[method-assign]
        trainer.checked_step.begin = begin_step  # type: ignore[method-assign]
        if self.watch is not None:
            self.watch(trainer)

    def waits(self, step: int = COUNTED_STEP) -> list[Wait]:
        """Waits for work of the same step or the last one; what is older has ended."""
        return [
            wait for wait in self.operations.gpu.waits if wait.step == step and wait.steps_late < 2
        ]

    def counted(self) -> tuple[Counter[str], Counter[str]]:
        """Waits of each micro-batch, and of a step besides."""
        of_first = Counter(wait.place for wait in self.waits() if wait.micro_batch == 0)
        of_all = Counter(wait.place for wait in self.waits())
        for place, count in of_first.items():
            of_all[place] -= MICRO_BATCHES * count
        return of_first, +of_all


def tiny_sections(folder: Path, corpus: Path, tokenizer: Path, **changes: Any) -> dict[str, Any]:
    """A recipe of 5 steps of 3 micro-batches."""
    tokens = 2 * 64 * MICRO_BATCHES
    sections: dict[str, Any] = {
        "name": "tiny",
        "stage": "pretrain",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": True, "config": TINY_LLAMA},
        "tokenizer": {"path": str(tokenizer)},
        "data": {"sequence_length": 64, "sources": [{"path": str(corpus / "domain.jsonl")}]},
        "budget": {"tokens": 5 * tokens, "global_batch_tokens": tokens},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
        "training": {
            "per_device_train_batch_size": 2,
            "logging_steps": 100,
            "torch_compile": False,
            "bf16": True,
        },
    }
    for key, value in changes.items():
        sections[key] = {**sections.get(key, {}), **value} if isinstance(value, dict) else value
    return sections


def run_labelled(
    sections: dict[str, Any],
    folder: Path,
    *,
    in_group: bool = False,
    group: AbstractContextManager[None] | None = None,
    watch: Callable[[CPTTrainer], None] | None = None,
) -> LabelledRun:
    """Train the recipe on a labelled GPU.

    Args:
        in_group: with a process group also where the engine needs none.
        group: of several processes; default: of this one alone.
    """
    recipe = load_recipe(write_recipe(sections, folder / "recipe.yaml"))
    deepspeed = "deepspeed" in sections["training"]
    with ExitStack() as stack:
        if in_group or deepspeed or "fsdp" in sections["training"]:
            stack.enter_context(group or process_group())
        run = LabelledRun(stack.enter_context(emulated_cuda(deepspeed=deepspeed)), watch=watch)
        train(recipe, ready=run.attach)
    return run


def of_engine(name: str) -> dict[str, Any]:
    """Sections of a recipe."""
    is_plain = name in ("one process", "DDP")
    model = {"dtype": "bfloat16" if is_plain else "auto"}
    return {"training": ENGINES[name], "model": model}


def of_optimizer(name: str) -> dict[str, Any]:
    dtype = "bfloat16" if "bf16" in name else "float32"
    return {"optimizer": OPTIMIZERS[name], "model": {"dtype": dtype}}


def row(name: str, run: LabelledRun) -> str:
    of_each, of_step = run.counted()
    cells = [name]
    for waits in (of_each, of_step):
        places = "; ".join(f"`{place}` {count}" for place, count in sorted(waits.items()))
        cells.append(f"{sum(waits.values())}" + (f": {places}" if places else ""))
    return f"| {' | '.join(cells)} |"


def row_of(name: str, sections: dict[str, Any], folder: Path) -> str:
    """The table's row of a run."""
    if "deepspeed" in sections["training"]:  # once, instead of in each child
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - imports torch's compiler
    (made,) = in_children(
        [lambda: row(name, run_labelled(sections, folder, in_group=name == "DDP"))], folder
    )
    return made


def in_children(functions: list[Callable[[], str]], folder: Path) -> list[str]:
    """Results of the functions, each in a process of its own, at once: libraries keep a run's process group.

    Raises:
        RuntimeError: with the error of the first that failed.
    """
    answers = [folder / f"answer-{number}" for number in range(len(functions))]
    gc.collect()
    gc.freeze()  # otherwise each collection in a child copies the memory
    children = [
        start_child(function, answer) for function, answer in zip(functions, answers, strict=True)
    ]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    for status, answer in zip(statuses, answers, strict=True):
        if status:
            raise RuntimeError(answer.read_text())
    return [answer.read_text() for answer in answers]


def start_child(function: Callable[[], str], answer: Path) -> int:
    """The number of a process that writes the function's result, or its error."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        answer.write_text(function())
        code = 0
    except BaseException:
        answer.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def table(folder: Path, corpus: Path, tokenizer: Path) -> str:
    """The page's table: one run for each row."""
    lines = ["| | waits of a micro-batch | other waits of a step |", "| --- | --- | --- |"]
    cases = {name: of_engine(name) for name in ENGINES}
    cases |= {f"one process, {name}": of_optimizer(name) for name in OPTIMIZERS}
    for number, (name, changes) in enumerate(cases.items()):
        own = folder / str(number)
        own.mkdir()
        lines.append(row_of(name, tiny_sections(own, corpus, tokenizer, **changes), own))
    return "\n".join(lines)


def on_page() -> str:
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["CPT_CACHE"] = str(folder / "cache")
        write_documents(folder / "domain.jsonl", 120, 0)
        texts = [
            json.loads(line)["text"] for line in (folder / "domain.jsonl").read_text().splitlines()
        ]
        train_bpe(texts, 320, folder / "tokenizer")
        made = table(folder, folder, folder / "tokenizer")
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n\n{made}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
