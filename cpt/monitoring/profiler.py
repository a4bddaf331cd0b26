"""Where the time of a step goes: a trace of a few steps by torch.profiler, and a table of the dearest operations."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import RecipeError
from cpt.recipe.schema import Profile
from cpt.runs.events import record_event

FOLDER = "profile"
ROWS = 40


class StepProfile(TrainerCallback):
    """Profiles some steps of the main process, and writes `profile/steps-A-B.json.gz` and `steps-A-B.txt` into the
    run's folder.

    The step before them warms the profiler up. Steps that are not made to their end, since the run went back or
    stopped, are told of.

    Args:
        run: the run's folder.
        at_step: the first of them, counted from 1.
        steps: how many.
        memory: follow allocations too, which takes more time.
    """

    def __init__(self, run: Path, *, at_step: int, steps: int = 3, memory: bool = False) -> None:
        self.folder, self.run = run / FOLDER, run
        self.first, self.last, self.memory = at_step, at_step + steps - 1, memory
        self.profiler: profile | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        return f"steps-{self.first}-{self.last}"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A run that goes on behind these steps does not come to them."""
        if (
            state.is_world_process_zero
            and state.global_step >= self.first
            and not (self.folder / f"{self.name}.txt").exists()
        ):
            self.tell(
                "profile_left_out",
                f"Steps {self.first} to {self.last} are not profiled: the run goes on from {state.global_step}.",
            )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer's loop begins anew where the run went back, or where memory ended."""
        self.give_up(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with the step before the first, which is not counted, or with the first of the run."""
        if state.is_world_process_zero and self.profiler is None and state.global_step + 1 == max(1, self.first - 1):
            self.profiler = profile(
                activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
                schedule=torch.profiler.schedule(
                    wait=0, warmup=min(1, self.first - 1), active=self.last - self.first + 1, repeat=1
                ),
                profile_memory=self.memory,
            )
            self.profiler.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After the last of them, write what was seen."""
        if self.profiler is None:
            return
        if state.global_step < self.last:
            self.profiler.step()
            return
        self.profiler.stop()
        self.write(self.profiler, args.device.type)
        self.profiler = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The run may end earlier."""
        self.give_up(state.global_step)

    def give_up(self, step: int) -> None:
        """Drop what was seen so far."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
            again = (
                "they are when it comes there again"
                if step < self.first - 1
                else "the run does not come to them again"
            )
            self.tell(
                "profile_left_out", f"Steps {self.first} to {self.last} were not profiled to their end: {again}."
            )

    def write(self, profiler: profile, device: str) -> None:
        """Both files; a disk that is full costs the profile alone."""
        table = profiler.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=80
        )
        trace = self.folder / f"{self.name}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            (self.folder / f"{self.name}.txt").write_text(table)
        except (OSError, RuntimeError) as problem:
            self.tell(
                "profile_left_out",
                f"The profile of steps {self.first} to {self.last} could not be written: {problem}.",
            )
            return
        text = (
            f"Steps {self.first} to {self.last} are profiled: {trace} (open it in ui.perfetto.dev), the dearest"
            " operations in"
        )
        self.tell("profile", f"{text} {self.name}.txt beside it.")

    def tell(self, kind: str, message: str) -> None:
        """An event of the first of these steps."""
        record_event(self.run, kind, message, step=self.first)


def check_profiled_steps(profile: Profile | None, steps: int) -> None:
    """Refuse to profile steps that the run does not have.

    Args:
        steps: of the whole run.

    Raises:
        RecipeError: with the key.
    """
    if profile is not None and (last := profile.at_step + profile.steps - 1) > steps:
        raise RecipeError(
            f"`monitoring.profile.at_step`: the last step to profile is {last}, and the run has {steps}. Begin"
            " earlier."
        )
