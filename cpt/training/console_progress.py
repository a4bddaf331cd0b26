"""Print the run's progress: a line for each log, and a progress bar below them on a terminal."""

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.console import open_console

FORMATS = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3g}",
    "rewards/accuracies": "accuracy {:.3g}",
    "accuracy": "accuracy {:.3g}",
    "rewards/margins": "margin {:.3g}",
    "margin": "margin {:.3g}",
    "learning_rate": "learning rate {:.2e}",
    "grad_norm": "gradient norm {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "gpu_memory_peak_gib": "GPU {:.1f} GiB",
    "host_memory_gib": "host {:.1f} GiB",
    "cost": "cost {:,.2f}",
}
HELD_OUT = ("loss", "reward", "rewards/accuracies", "accuracy", "rewards/margins", "margin")  # of sets without bytes


class ConsoleProgress(TrainerCallback):
    """Prints from the main process; it comes after the callbacks that add figures."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.name = name
        self.console = console or open_console()
        self.progress: Progress | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self.console.is_interactive:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self.progress = Progress(TextColumn("{task.description}"), *columns, console=self.console)
            self.task = self.progress.add_task(self.name, total=state.max_steps, completed=state.global_step)
            self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.progress:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        line = describe_logs(kwargs["logs"])
        if state.is_world_process_zero and line:
            step = f"step {state.global_step}/{state.max_steps}{time_to_go(kwargs['logs'])}"
            with suppress(OSError):  # a full disk behind the output, or a closed terminal
                self.console.print(f"{self.name}  {step}  {line}", highlight=False, soft_wrap=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.progress:
            self.progress.stop()


def time_to_go(logs: dict[str, Any]) -> str:
    """`  12:34 to go`; empty if unknown."""
    seconds = round(logs.get("seconds_to_go", 0))
    if not seconds:
        return ""
    hours, minutes = divmod(seconds // 60, 60)
    return f"  {hours}:{minutes:02d}:{seconds % 60:02d} to go" if hours else f"  {minutes}:{seconds % 60:02d} to go"


def describe_logs(logs: dict[str, Any]) -> str:
    """The figures of one log as a line; empty for the Trainer's closing summary."""
    if "loss" in logs:
        return "  ".join(form.format(logs[name]) for name, form in FORMATS.items() if name in logs)
    keys = [key.removeprefix("eval_") for key in logs if key.startswith("eval_")]
    ends = ("_loss", "_examples")  # rewards of answers that the model generated have no loss
    sets = dict.fromkeys(key.removesuffix(end) for key in keys for end in ends if key.endswith(end))
    return "held out: " + ", ".join(f"{name} {held_out_figures(name, logs)}" for name in sets) if sets else ""


def held_out_figures(name: str, logs: dict[str, Any]) -> str:
    """Bits per byte of texts; loss, accuracy and margin of examples."""
    if (bits := logs.get(f"eval_{name}_bits_per_byte")) is not None:
        return f"{bits:.4f} bits per byte"
    return " ".join(FORMATS[one].format(logs[key]) for one in HELD_OUT if (key := f"eval_{name}_{one}") in logs)
