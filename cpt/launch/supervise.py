"""Start a run, watch it, and restart it if it dies or hangs, within a budget."""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cpt.command_line import refuse_ignored
from cpt.errors import CptError, Interrupted, LaunchError, RestartNeeded, TrainingError
from cpt.hardware import count_cpu_cores, find_gpus
from cpt.process import MOST_WITHOUT_PROGRESS, Child, ReceivedSignals, is_without_progress, send
from cpt.recipe.schema import Recipe
from cpt.runs.events import (
    SIGNAL_FOR_STACKS,
    STACKS,
    LastHeartbeat,
    is_of_this_host,
    name_processes,
    pids_here,
    read_events,
    read_heartbeats,
    record_event,
    remove_heartbeats,
    write_waiting_events,
)
from cpt.runs.folder import EVENTS
from cpt.runs.record import Run, start_run

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
MOST_RESTARTS = 10  # per hour, of a supervised run
BY_THE_LAUNCHER = 'with --launcher, which sets it: --launcher "torchrun --nproc-per-node 2"'
PROCESSES_OF_A_CORE = 4  # on a CPU; more processes only wait for each other
SECONDS_BETWEEN_LOOKS = 0.5  # at the heartbeats
SECONDS_FOR_STACKS = 2.0
SECONDS_FOR_OTHER_SUPERVISORS = 60.0  # each reads the run's folder before it starts its processes
# seconds before a restart
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
SAME_STEP_LIMIT = 3  # failures at the same step
SECONDS_OF_BUDGET = 3600.0
LEAST_PATIENCE = 30.0  # seconds without progress in a step
STEPS_OF_PATIENCE = 5  # median steps
SECONDS_TO_BE_GONE = 10.0  # five pulses
# Before the first and after the last step, any CPU work counts as progress; in an evaluation, each batch; in a save,
# none.
PATIENCE = {"starting": 3600.0, "first steps": 600.0, "between": 1800.0, "ending": 3600.0}


@dataclass(frozen=True)
class Ended:
    code: int  # exit code of the started process; launchers change it
    state: str  # of status.json; `running` if the run died before updating it
    error: str | None
    own_code: int | None  # the exit code that the run itself wrote to status.json
    message: str
    step: int  # the last step of any process
    hung: bool
    at: float  # time on a monotonic clock


@dataclass(frozen=True)
class RestartDecision:
    action: Literal["done", "again", "give up", "stop"]
    reason: str = ""
    code: int = 0


def supervise_run(
    recipe: Recipe,
    arguments: Sequence[str],
    *,
    check: Callable[[Path], bool],
    new: bool = False,
    processes: int = 1,
    launcher: str | None = None,
    restarts: int | None = MOST_RESTARTS,
) -> None:
    """Start a run by cpt/train.py with the arguments, and wait for its end; with `--supervise`, restart it if useful,
    at most `restarts` times in an hour. None, without `--supervise`: restart only if the run requests it, and exit
    with the run's exit code."""
    if "RANK" in os.environ:
        options = "--supervise, --processes and --launcher"
        raise LaunchError(
            f"{options} start the run's processes: run `cpt train` without a launcher."
        )
    if launcher is None:
        refuse_more_than_the_machine_holds(processes, on_gpus=not recipe.training.get("use_cpu"))
    patience = 0.0
    if launcher is not None and names_several_hosts(launcher):
        patience = SECONDS_FOR_OTHER_SUPERVISORS
        if new:
            raise LaunchError(
                "--new would start a separate run on each host. Set another name: name=..."
            )
    run = start_run(recipe, check=check, new=new, patience=patience, trains=False)
    if run.lock is not None:
        run.lock.close()  # the attempts lock it
    if run.folder.name != recipe.name:
        arguments = [*arguments, f"name={run.folder.name}"]
    command = command_of_attempt(arguments, processes, launcher)
    decision = Supervisor(run, command, restarts=restarts).supervise()
    if decision.action == "stop":
        raise Interrupted(decision.reason)
    if decision.action == "give up":
        text = f"{decision.reason.removesuffix('.')}."
        if (run.folder / EVENTS).exists():
            text += f" The events are in {run.folder / EVENTS}."
        problem = TrainingError(text)
        problem.exit_code = decision.code if restarts is None else TrainingError.exit_code
        raise problem


@dataclass
class Supervisor:
    run: Run
    command: Sequence[str]
    """The command of an attempt."""
    restarts: int | None = MOST_RESTARTS
    """As in `supervise_run`."""
    endings: list[Ended] = field(default_factory=list)

    def supervise(self) -> RestartDecision:
        folder = self.run.folder
        received = ReceivedSignals()  # while no child runs
        try:
            with received.noted():
                while True:
                    ending, number = self.attempt()
                    self.endings.append(ending)
                    decision = next_move(self.endings, restarts=self.restarts)
                    if decision.action == "again" and not number and not received.first:
                        text = f"{decision.reason}. Restart {len(self.endings)}."
                        record_event(folder, "restart", text, step=ending.step)
                        received.wait(seconds_before_restart(self.endings))
                    number = number or received.first
                    died_of_signal = (
                        self.restarts is None
                        and ending.own_code is None
                        and decision.action == "give up"
                    )
                    if number and (decision.action == "again" or died_of_signal):
                        reason = f"{signal.Signals(number).name}: {decision.reason}"
                        return RestartDecision("stop", reason, Interrupted.exit_code)
                    if decision.action == "give up" and self.restarts is not None:
                        text = f"{decision.reason}. Not restarted."
                        record_event(folder, "gave_up", text, step=ending.step)
                    if decision.action != "again":
                        return decision
        finally:
            write_waiting_events(folder)

    def attempt(self) -> tuple[Ended, int]:
        """Start the run once; return how it ended, and the forwarded signal or 0."""
        folder = self.run.folder
        remove_heartbeats(folder)
        last_update = self.run.status().get("updated")
        num_events = len(read_events(folder))
        # SLURM sends SIGUSR1 to all processes of a step; torchrun would die from it and leave its workers running.
        child = Child(
            self.command,
            environment={"CPT_RESTART_COUNT": str(len(self.endings))},
            ignores=signal.SIGUSR1,
        )
        watch = RunWatch(folder)
        hung = None
        checked_at = 0.0

        def is_hung() -> bool:
            nonlocal hung, checked_at
            seconds = time.monotonic()
            if seconds - checked_at >= SECONDS_BETWEEN_LOOKS:
                checked_at = seconds
                hung = watch.hung(seconds)
                if hung is not None:
                    self.record_hang(hung, watch.gone(seconds))
            return hung is not None

        code, number = child.wait_for_end(is_hung, lambda number: self.forward(number, child.pid))
        gone = [beat for beat in watch.gone(time.monotonic()) if not is_of_this_host(beat)]
        status = self.run.status()
        state = status.get("state", "running")
        if state == "running" or (status.get("updated") == last_update and state != "finished"):
            # from an earlier attempt, or the run died before updating it
            status = {}
            state = "running"
        error = status.get("error")
        message = str(status.get("message", ""))
        heartbeats = read_heartbeats(folder)
        if gone and not message:  # a library killed the processes: NCCL's watchdog
            message = without_heartbeat(gone, heartbeats)
        # A rank that ran out of memory may be the only one to record it, since the others wait on their GPUs.
        for event in read_events(folder)[num_events:]:
            if event["kind"] == "out_of_memory" and event.get("restart"):
                error = RestartNeeded.__name__
                message = event["message"]
        ending = Ended(
            code=code,
            state=state,
            error=error,
            own_code=status.get("exit_code"),
            message=message,
            step=max((beat.step for beat in heartbeats), default=0),
            hung=hung is not None,
            at=time.monotonic(),
        )
        return ending, number

    def forward(self, number: int, launcher: int) -> None:
        """Signal the run's processes, since launchers treat signals differently; before they start, the launcher."""
        pids = pids_here(self.run.folder)
        for pid in pids:
            send(pid, number)
        if not pids:
            if number == signal.SIGUSR1:  # most launchers have no handler for it
                number = signal.SIGTERM
            send(launcher, number)

    def record_hang(self, beat: LastHeartbeat, gone: Sequence[LastHeartbeat]) -> None:
        cause = ""
        if gone:
            cause = f" {without_heartbeat(gone, read_heartbeats(self.run.folder))}."
        record_event(
            self.run.folder,
            "hang",
            f"process {beat.rank} (pid {beat.pid} on {beat.host}) made no progress for {patience(beat):.0f} s after"
            f" step {beat.step} ({beat.phase}).{cause} The stacks are in {self.run.folder / STACKS}; all processes of"
            " this host are killed.",
        )
        for pid in pids_here(self.run.folder):
            send(pid, SIGNAL_FOR_STACKS)
        time.sleep(SECONDS_FOR_STACKS)


def seconds_before_restart(endings: Sequence[Ended]) -> float:
    """Longer after each failure; 0 if the run requested the restart."""
    if endings[-1].error == RestartNeeded.__name__:
        return 0.0
    failures = failures_in(endings)
    return min(LONGEST_WAIT, FIRST_WAIT * 2 ** (len(failures) - 1))


def failures_in(endings: Sequence[Ended]) -> list[Ended]:
    return [ending for ending in endings if ending.error != RestartNeeded.__name__]


def next_move(endings: Sequence[Ended], *, restarts: int | None) -> RestartDecision:
    """Decide whether to restart, by how all attempts ended; `restarts` as in `supervise_run`."""
    last = endings[-1]
    # On other hosts than the main process's, the file may update a little later.
    if last.state == "finished" or (last.state == "running" and last.code == 0):
        return RestartDecision("done")
    if last.error == RestartNeeded.__name__:
        # Progress (a step, a smaller micro-batch, another roll-back) changes the message.
        if is_without_progress([ending.message for ending in endings]):
            reason = (
                f"{last.message} It was restarted {MOST_WITHOUT_PROGRESS} times without progress"
            )
            return RestartDecision("give up", reason, RestartNeeded.exit_code)
        return RestartDecision("again", last.message)
    if last.state == "interrupted":
        return RestartDecision("stop", last.message, Interrupted.exit_code)
    if last.own_code == CptError.exit_code and last.error != LaunchError.__name__:
        return RestartDecision("give up", last.message, CptError.exit_code)
    event = "hung" if last.hung else f"ended with code {last.code}"
    reason = f"the run {event} after step {last.step}"
    cause = ": ".join(filter(None, (last.error, last.message)))
    if cause:
        reason += f" ({cause})"
    failures = failures_in(endings)
    at_same_step = [ending for ending in failures if ending.step == last.step]
    in_last_hour = [ending for ending in failures if last.at - ending.at < SECONDS_OF_BUDGET]
    if restarts is None:
        reason += (
            ". `cpt train --supervise` restarts a run automatically from its newest checkpoint"
        )
    elif len(at_same_step) >= SAME_STEP_LIMIT:
        reason += f", like {SAME_STEP_LIMIT - 1} previous attempts, so a restart does not help"
    elif len(in_last_hour) > restarts:
        reason += f", and it was already restarted {restarts} times in an hour (--restarts)"
    else:
        return RestartDecision("again", reason)
    return RestartDecision("give up", reason, last.own_code or 1)


def without_heartbeat(gone: Sequence[LastHeartbeat], everyone: Sequence[LastHeartbeat]) -> str:
    return f"{name_processes(gone, everyone)} lost its heartbeat"


def patience(beat: LastHeartbeat) -> float:
    """Seconds without progress after which a process counts as hung."""
    if beat.phase != "training":
        return PATIENCE[beat.phase]
    if beat.seconds_per_step is None:
        return PATIENCE["first steps"]
    return max(LEAST_PATIENCE, STEPS_OF_PATIENCE * beat.seconds_per_step)


@dataclass
class RunWatch:
    """Finds a process without progress for too long, from heartbeat files and this machine's clock. Each supervisor
    watches the processes of its host; without local processes, as on a login node, it watches all."""

    folder: Path
    beats: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """(rank, pid) -> the last progress count, and when it was first read, in seconds."""
    pulses: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """The same for the pulse, which increases while the process exists."""

    def hung(self, seconds: float) -> LastHeartbeat | None:
        """Return the process that exceeds its patience most, if any, at a time of the monotonic clock.

        While processes start or end, one may work while the others wait: the last heartbeat of any counts. Heartbeats
        are missing on a read-only disk, and after the run has finished, while its verdict is computed.
        """
        if not os.access(self.folder, os.W_OK):
            self.beats.clear()
            self.pulses.clear()
            return None
        heartbeats = read_heartbeats(self.folder)
        for beat in heartbeats:
            for counts, count in ((self.beats, beat.beats), (self.pulses, beat.pulse)):
                last_count, _ = counts.get((beat.rank, beat.pid), (-1, seconds))
                if count != last_count:
                    counts[beat.rank, beat.pid] = (count, seconds)
        last_progress = {beat: self.beats[beat.rank, beat.pid][1] for beat in heartbeats}
        last_of_any = max(last_progress.values(), default=seconds)
        silent_seconds: dict[LastHeartbeat, float] = {}
        for beat in heartbeats:
            waits_for_others = beat.phase in ("starting", "ending")
            since = last_of_any if waits_for_others else last_progress[beat]
            silent_seconds[beat] = seconds - since
        watched = [beat for beat in heartbeats if is_of_this_host(beat)] or heartbeats
        late = [beat for beat in watched if silent_seconds[beat] > patience(beat)]
        if not late or Run(self.folder).status().get("state") == "finished":
            return None
        return max(late, key=lambda beat: silent_seconds[beat])

    def gone(self, seconds: float) -> list[LastHeartbeat]:
        """Return the processes whose heartbeat stopped without a recorded end."""
        gone = []
        for beat in read_heartbeats(self.folder):
            _, last_pulse = self.pulses.get((beat.rank, beat.pid), (0, seconds))
            if beat.ended is None and seconds - last_pulse > SECONDS_TO_BE_GONE:
                gone.append(beat)
        return gone


def command_of_attempt(
    arguments: Sequence[str], processes: int, launcher: str | None, program: Path | str = TRAIN
) -> list[str]:
    """The command that starts a run, with torchrun or a launcher such as `accelerate launch --config_file FILE`;
    another program if it is a path, or `-m` with the module in the arguments."""
    if launcher is not None:
        return [*shlex.split(launcher), str(program), *arguments]
    if processes == 1:
        return [sys.executable, str(program), *arguments]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    return [*torchrun, str(program), *arguments]


def names_several_hosts(launcher: str) -> bool:
    """Whether a launcher's command starts one host of several: `torchrun --nnodes 2`, `deepspeed --no_ssh`."""
    counts = re.findall(r"--(?:nnodes|num[_-]machines)[= ](\S+)", launcher)
    return "--no_ssh" in launcher.split() or any(count.split(":")[-1] != "1" for count in counts)


def refuse_launcher(command: str, *, sets_processes: bool, launcher: str | None) -> None:
    """LaunchError if a command that starts processes itself was started by a launcher; RecipeError if their number is
    given twice."""
    if "RANK" in os.environ:
        raise LaunchError(
            f"`cpt {command}` starts processes itself. Run it directly, with --processes N or --launcher."
        )
    refuse_ignored({"--processes": sets_processes and launcher is not None}, BY_THE_LAUNCHER)


def refuse_more_than_the_machine_holds(processes: int, *, on_gpus: bool) -> None:
    gpus = len(find_gpus()) if on_gpus else 0
    if gpus:
        max_processes = gpus
        hardware = f"{gpus} GPUs"
    else:
        max_processes = PROCESSES_OF_A_CORE * count_cpu_cores()
        hardware = f"{count_cpu_cores()} cores"
    if processes > max_processes:
        raise LaunchError(
            f"--processes {processes}: this machine has {hardware}. Use at most {max_processes}."
        )
