"""Start a run, watch it, and start it again where it ended before its time or stands still, within a budget."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from cpt.errors import Interrupted, LaunchError, RestartNeeded, TrainingError
from cpt.launchers.restart_policy import Decision, Ended, next_move
from cpt.recipe.schema import Recipe
from cpt.runs.events import FILE_NAME as EVENTS
from cpt.runs.events import read_events, record_event, write_waiting_events
from cpt.runs.record import Run, start_run
from cpt.safety.heartbeat import SIGNAL_FOR_STACKS, STACKS, Sign, forget_signs, read_signs

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
SUPERVISED = "CPT_SUPERVISED"  # in the environment of all processes that a supervisor started: its process number
SECONDS_BETWEEN_LOOKS = 0.5
LEAST_PATIENCE = 30.0  # seconds without progress in a step
STEPS_OF_PATIENCE = 5  # median steps
# Seconds without a sign: before the first and after the last step any work is one, in an evaluation each batch, in a save nothing.
PATIENCE = {"starting": 3600.0, "first steps": 600.0, "between": 1800.0, "ending": 3600.0}
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before a start
SECONDS_FOR_STACKS = 2.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def seconds_before_next(endings: Sequence[Ended]) -> float:
    """Longer after each failure; what the run learned to need less memory is tried at once."""
    failures = sum(ending.error != RestartNeeded.__name__ for ending in endings)
    return 0.0 if endings[-1].error == RestartNeeded.__name__ else min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1))


def patience(sign: Sign) -> float:
    """Seconds without progress after which a process counts as hung."""
    if sign.phase != "training":
        return PATIENCE[sign.phase]
    if sign.seconds_per_step is None:
        return PATIENCE["first steps"]
    return max(LEAST_PATIENCE, STEPS_OF_PATIENCE * sign.seconds_per_step)


@dataclass
class Watch:
    """Sees which process made no progress for too long, by this machine's clock."""

    folder: Path
    beats: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """(rank, pid) -> the last count, and when it was seen first."""

    def hung(self, now: float) -> Sign | None:
        """The process that was silent for longest past its patience, if any.

        Of processes that start or end one may work while the others wait for it, so there the last sign of any of them counts. On a disk
        that is read-only nobody can give a sign, and after the run is finished nobody has to: then its verdict is being made.
        """
        if not os.access(self.folder, os.W_OK):
            self.beats.clear()
            return None
        signs = read_signs(self.folder)
        for sign in signs:
            if self.beats.get((sign.rank, sign.pid), (-1, now))[0] != sign.beats:
                self.beats[sign.rank, sign.pid] = (sign.beats, now)
        seen = {sign: self.beats[sign.rank, sign.pid][1] for sign in signs}
        last = max(seen.values(), default=now)
        silent = {sign: now - (last if sign.phase in ("starting", "ending") else seen[sign]) for sign in signs}
        late = [sign for sign in signs if silent[sign] > patience(sign)]
        return max(late, key=lambda sign: silent[sign]) if late and Run(self.folder).status().get("state") != "finished" else None


@dataclass
class Supervisor:
    """Runs the attempts.

    Args:
        run: the run's folder.
        words: the command of an attempt.
        restarts: allowed in one hour.
        resumes: start again after an error, too.
    """

    run: Run
    words: Sequence[str]
    restarts: int = 10
    resumes: bool = True
    asked_to_stop: int = 0
    interrupts: int = 0
    wake: threading.Event = field(default_factory=threading.Event)

    def supervise(self) -> Decision:
        """Start the run until it is done, given up or told to stop."""
        before = {number: signal.signal(number, self.at_signal) for number in FORWARDED}
        endings: list[Ended] = []
        try:
            while True:
                endings.append(self.attempt(len(endings)))
                decision = next_move(endings, restarts=self.restarts, resumes=self.resumes)
                if self.asked_to_stop and decision.what == "again":
                    decision = Decision("stop", f"{signal.Signals(self.asked_to_stop).name}: {decision.why}", Interrupted.exit_code)
                if decision.what != "again":
                    if decision.what == "give up":
                        self.tell("gave_up", f"{decision.why}. Not started again.", endings[-1])
                    return decision
                self.tell("restart", f"{decision.why}. Starting again (restart {len(endings)}).", endings[-1])
                self.wake.wait(seconds_before_next(endings))
        finally:
            write_waiting_events(self.run.folder)
            for number, handler in before.items():
                signal.signal(number, handler)

    def attempt(self, number: int) -> Ended:
        """One start to its end.

        Args:
            number: of attempts before it; what was asked for the first start only, such as `--resume PATH`, does not count after it.
        """
        forget_signs(self.run.folder)
        known, before = self.run.status().get("updated"), len(read_events(self.run.folder))
        marks = {SUPERVISED: str(os.getpid()), "CPT_RESTART_COUNT": str(number)}
        child = subprocess.Popen(self.words, env={**os.environ, **marks}, start_new_session=True)
        watch, hung, forwarded = Watch(self.run.folder), None, 0
        while child.poll() is None:
            self.wake.wait(SECONDS_BETWEEN_LOOKS)
            self.wake.clear()
            if self.interrupts > 1:
                kill_family(child.pid)
            elif self.asked_to_stop and self.asked_to_stop != forwarded:
                forwarded = self.asked_to_stop
                self.forward(forwarded, child.pid)
            hung = watch.hung(time.monotonic())
            if hung is not None:
                self.end_hung(hung, child.pid)
                break
        code = child.wait()
        kill_family(child.pid)  # what a launcher that was killed left behind
        ended = self.ending(code, hung is not None, known)
        # A rank that ran out of memory may be the only one that could say so: the others wait for it on their GPUs.
        learned = [event for event in read_events(self.run.folder)[before:] if event["kind"] == "out_of_memory" and event.get("restart")]
        return replace(ended, error=RestartNeeded.__name__, message=learned[-1]["message"]) if learned else ended

    def forward(self, number: int, launcher: int) -> None:
        """Tell the run's own processes: launchers pass signals on in ways of their own."""
        pids = [sign.pid for sign in read_signs(self.run.folder)] or [launcher]
        for pid in pids:
            send(pid, number)

    def end_hung(self, sign: Sign, launcher: int) -> None:
        """Write down where every process stands, then end them all."""
        self.tell(
            "hang",
            f"process {sign.rank} (pid {sign.pid}) made no progress for {patience(sign):.0f} s after step {sign.step} ({sign.phase}). "
            f"The stacks are in {self.run.folder / STACKS}; all processes are ended.",
        )
        for other in read_signs(self.run.folder):
            send(other.pid, SIGNAL_FOR_STACKS)
        time.sleep(SECONDS_FOR_STACKS)
        kill_family(launcher)

    def ending(self, code: int, hung: bool, known: str | None) -> Ended:
        """What the attempt left behind."""
        status = self.run.status()
        told = status.get("state", "running")
        if known == status.get("updated") and told != "finished":
            status, told = {}, "running"  # it died before it could say anything
        step = max([sign.step for sign in read_signs(self.run.folder)] + [0])
        message = str(status.get("message", "")) if told != "running" else ""
        error = status.get("error") if told != "running" else None
        own_code = status.get("exit_code") if told != "running" else None
        return Ended(code, told, error, own_code, message, step, hung, time.monotonic())

    def at_signal(self, number: int, _: object) -> None:
        """Pass it on; a second SIGINT ends everything."""
        self.asked_to_stop = self.asked_to_stop or number
        self.interrupts += number == signal.SIGINT
        self.wake.set()

    def tell(self, kind: str, message: str, ending: Ended | None = None) -> None:
        """One event."""
        record_event(self.run.folder, kind, message, step=ending.step if ending else None)


def kill_family(pid: int) -> None:
    """End a process, its session and all below it, at once.

    torchrun starts its processes in sessions of their own, which outlive it when it is killed: they are found by
    CPT_SUPERVISED in their environment.
    """
    family = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SUPERVISED) == str(os.getpid()):
                family.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    for process in family:
        send(process.pid, signal.SIGKILL)
    send(pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)


def send(pid: int, number: int) -> None:
    """A signal, if the process is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def command_of_attempt(arguments: Sequence[str], processes: int, launcher: str | None, program: Path = TRAIN) -> list[str]:
    """The words that start a run.

    Args:
        arguments: of cpt/train.py.
        processes: on this machine.
        launcher: words of another launcher, such as `accelerate launch --config_file launch/x.yaml`.
        program: started instead of cpt/train.py.
    """
    if launcher is not None:
        return [*shlex.split(launcher), str(program), *arguments]
    if processes == 1:
        return [sys.executable, str(program), *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*torchrun, str(program), *arguments]


def supervise_run(
    recipe: Recipe,
    arguments: Sequence[str],
    *,
    new: bool = False,
    processes: int = 1,
    launcher: str | None = None,
    restarts: int = 10,
) -> None:
    """What `cpt train --supervise` does: the run in processes of its own, started again as often as it helps and is allowed.

    Args:
        arguments: of cpt/train.py, for every attempt.
        new: begin a run beside one of the same name.

    Raises:
        Interrupted: it was told to stop, and has saved.
        LaunchError: a launcher started this process; it has to be the other way round.
        RecipeError: the run's folder belongs to another recipe, or cannot be written.
        TrainingError: it was given up.
    """
    if "RANK" in os.environ:
        raise LaunchError(
            "--supervise starts the run's processes itself. Type `cpt train RECIPE --supervise --processes N`, or with another launcher: "
            '--launcher "accelerate launch --config_file FILE".'
        )
    run = start_run(recipe, new=new)
    if run.lock is not None:
        run.lock.close()  # the attempts take it
    if run.folder.name != recipe.name:
        arguments = [*arguments, f"name={run.folder.name}"]
    words = command_of_attempt(arguments, processes, launcher)
    resumes = recipe.safety.on_error == "resume"
    decision = Supervisor(run, words, restarts=restarts, resumes=resumes).supervise()
    if decision.what == "stop":
        raise Interrupted(decision.why)
    if decision.what == "give up":
        raise TrainingError(f"{decision.why}. What happened is in {run.folder / EVENTS}.")
