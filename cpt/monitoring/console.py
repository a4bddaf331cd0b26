"""Tell the person at the terminal how the run goes: a progress bar, or one line for each log where output is a
file."""

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.console import open_console

OF_EXAMPLES = {
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "rewards/margins": "margin",
    "margin": "margin",
}
"""Figures of TRL's trainers that one looks at first, by what they are called in a line."""


OF_THE_MACHINE = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "gpu_memory_peak_gib": "GPU {:.1f} GiB",
    "host_memory_gib": "host {:.1f} GiB",
    "cost": "cost {:,.2f}",
}
"""Figures of speed and memory, as a line has them."""


class ConsoleProgress(TrainerCallback):
    """The main process prints loss, learning rate, speed, memory and the time that is left at each log, and the
    evaluation's figures.

    It must stand behind the callbacks that add them.
    """

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.name = name
        self.console = console or open_console()
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar."""
        if state.is_world_process_zero and self.console.is_interactive:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task(self.name, total=state.max_steps, completed=state.global_step)
            self.progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self.progress:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One line of figures."""
        if state.is_world_process_zero:
            line = describe_logs(kwargs["logs"])
            if line:
                text = f"{self.name}  step {state.global_step}/{state.max_steps}{time_to_go(kwargs['logs'])}  {line}"
                with suppress(
                    OSError
                ):  # the output may go to a file on a disk that is full, or to a terminal that is gone
                    self.console.print(text, highlight=False, soft_wrap=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self.progress:
            self.progress.stop()


def time_to_go(logs: dict[str, Any]) -> str:
    """`  12:34 to go`; nothing where there is none, or nobody knows yet."""
    seconds = round(logs.get("seconds_to_go", 0))
    if not seconds:
        return ""
    hours, minutes = divmod(seconds // 60, 60)
    return f"  {hours}:{minutes:02d}:{seconds % 60:02d} to go" if hours else f"  {minutes}:{seconds % 60:02d} to go"


def describe_logs(logs: dict[str, Any]) -> str:
    """The figures of one log as a line; empty for the Trainer's closing summary."""
    if "loss" in logs:
        line = f"loss {logs['loss']:.4f}"
        line += "".join(f"  {word} {logs[name]:.3g}" for name, word in OF_EXAMPLES.items() if name in logs)
        line += f"  learning rate {logs['learning_rate']:.2e}"
        if "grad_norm" in logs:
            line += f"  gradient norm {logs['grad_norm']:.2f}"
        return line + "".join(
            f"  {written.format(logs[name])}" for name, written in OF_THE_MACHINE.items() if name in logs
        )
    ends = ("_loss", "_examples")  # rewards of answers that the model gave have no loss
    keys = [key.removeprefix("eval_") for key in logs if key.startswith("eval_")]
    sets = dict.fromkeys(key.removesuffix(end) for key in keys for end in ends if key.endswith(end))
    return "held out: " + ", ".join(f"{name} {held_out_figures(name, logs)}" for name in sets) if sets else ""


def held_out_figures(name: str, logs: dict[str, Any]) -> str:
    """Of a held-out set: bits per byte of texts; of examples the loss, and how often and by how much the better answer
    wins."""
    if (bits := logs.get(f"eval_{name}_bits_per_byte")) is not None:
        return f"{bits:.4f} bits per byte"
    others = [f"{word} {logs[key]:.3g}" for one, word in OF_EXAMPLES.items() if (key := f"eval_{name}_{one}") in logs]
    loss = logs.get(f"eval_{name}_loss")
    return " ".join([*([] if loss is None else [f"loss {loss:.4f}"]), *others])
