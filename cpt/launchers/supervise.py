"""Start a run, watch it, and start it again where it ended before its time or stands still, within a budget."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cpt.errors import Interrupted, LaunchError, RestartNeeded, TrainingError
from cpt.launchers.attempts import (
    FORWARDED,
    MOST_RESTARTS,
    SUPERVISED,
    command_of_attempt,
    die_with_parent,
    kill_family,
    names_several_hosts,
    refuse_more_than_the_machine_holds,
    send,
)
from cpt.launchers.restart_policy import Decision, Ended, next_move
from cpt.launchers.watch import Watch, patience
from cpt.recipe.schema import Recipe
from cpt.runs.events import read_events, record_event, write_waiting_events
from cpt.runs.folder import EVENTS
from cpt.runs.record import Run, start_run
from cpt.runs.signs import Sign, forget_signs, is_of_this_host, name_processes, pids_here, read_signs
from cpt.safety.heartbeat import SIGNAL_FOR_STACKS, STACKS

SECONDS_BETWEEN_LOOKS = 0.5
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before a start
SECONDS_FOR_STACKS = 2.0
SECONDS_FOR_OTHER_SUPERVISORS = 60.0  # each looks at the run's folder before it starts its processes


def seconds_before_next(endings: Sequence[Ended]) -> float:
    """Longer after each failure; what the run learned to need less memory is tried at once."""
    failures = sum(ending.error != RestartNeeded.__name__ for ending in endings)
    return 0.0 if endings[-1].error == RestartNeeded.__name__ else min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1))


@dataclass
class Supervisor:
    """Runs the attempts.

    Args:
        run: the run's folder.
        words: the command of an attempt.
        restarts: allowed in one hour; None: start it once, and again only where the run asks for it (RestartNeeded).
        resumes: start again after an error, too.
    """

    run: Run
    words: Sequence[str]
    restarts: int | None = MOST_RESTARTS
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
                if self.asked_to_stop and (
                    decision.what == "again" or self.restarts is None and endings[-1].own_code is None
                ):
                    decision = Decision(
                        "stop", f"{signal.Signals(self.asked_to_stop).name}: {decision.why}", Interrupted.exit_code
                    )
                if decision.what != "again":
                    if decision.what == "give up" and self.restarts is not None:
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
            number: of attempts before it; what was asked for the first start only, such as `--resume PATH`, does not
                count after it.
        """
        forget_signs(self.run.folder)
        known, before = self.run.status().get("updated"), len(read_events(self.run.folder))
        marks = {SUPERVISED: str(os.getpid()), "CPT_RESTART_COUNT": str(number)}
        try:
            child = subprocess.Popen(
                self.words, env={**os.environ, **marks}, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as problem:
            raise LaunchError(f"--launcher: {self.words[0]} cannot be started: {problem.strerror}.") from problem
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
                self.end_hung(hung, watch.gone(time.monotonic()), child.pid)
                break
        gone = [sign for sign in watch.gone(time.monotonic()) if not is_of_this_host(sign)]
        code = child.wait()
        kill_family(child.pid)  # what a launcher that was killed left behind
        ended = self.ending(code, hung is not None, known)
        if gone and not ended.message:  # a library ended the others: NCCL's watchdog
            ended = replace(ended, message=self.without_life(gone))
        # A rank that ran out of memory may be the only one that could say so: the others wait for it on their GPUs.
        learned = [
            event
            for event in read_events(self.run.folder)[before:]
            if event["kind"] == "out_of_memory" and event.get("restart")
        ]
        return replace(ended, error=RestartNeeded.__name__, message=learned[-1]["message"]) if learned else ended

    def forward(self, number: int, launcher: int) -> None:
        """Tell the run's own processes: launchers pass signals on in ways of their own."""
        for pid in pids_here(self.run.folder) or [launcher]:
            send(pid, number)

    def without_life(self, gone: Sequence[Sign]) -> str:
        """Which processes the others wait for."""
        return f"{name_processes(gone, read_signs(self.run.folder))} gives no sign of life"

    def end_hung(self, sign: Sign, gone: Sequence[Sign], launcher: int) -> None:
        """Write down where every process stands, then end them all."""
        cause = f" {self.without_life(gone)}." if gone else ""
        self.tell(
            "hang",
            f"process {sign.rank} (pid {sign.pid} on {sign.host}) made no progress for {patience(sign):.0f} s after"
            f" step {sign.step} ({sign.phase}).{cause} The stacks are in {self.run.folder / STACKS}; all processes of"
            " this host are ended.",
        )
        for pid in pids_here(self.run.folder):
            send(pid, SIGNAL_FOR_STACKS)
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


def supervise_run(
    recipe: Recipe,
    arguments: Sequence[str],
    *,
    new: bool = False,
    processes: int = 1,
    launcher: str | None = None,
    restarts: int | None = MOST_RESTARTS,
) -> None:
    """Start a run's processes and wait for their end; with `--supervise`, restart them as often as it helps and is
    allowed.

    Args:
        arguments: of cpt/train.py, for every attempt.
        new: begin a run beside one of the same name.
        restarts: allowed in one hour; None without `--supervise`: this process then ends with the run's own exit code.

    Raises:
        Interrupted: it was told to stop, and has saved.
        LaunchError: a launcher started this process; it has to be the other way round.
        RecipeError: the run's folder belongs to another recipe, or cannot be written.
        TrainingError: it was given up.
    """
    if "RANK" in os.environ:
        raise LaunchError(
            "--supervise, --processes and --launcher start the run's processes themselves. Type `cpt train RECIPE"
            ' --processes N`, or with another launcher: --launcher "accelerate launch --config_file FILE".'
        )
    if launcher is None:
        refuse_more_than_the_machine_holds(processes, on_gpus=not recipe.training.get("use_cpu"))
    several = launcher is not None and names_several_hosts(launcher)
    if several and new:
        raise LaunchError(
            "--new would begin one run for each host's supervisor. Give the run a name that is free instead: name=..."
        )
    run = start_run(recipe, new=new, patience=SECONDS_FOR_OTHER_SUPERVISORS if several else 0.0, trains=False)
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
        happened = f" What happened is in {run.folder / EVENTS}." if (run.folder / EVENTS).exists() else ""
        problem = TrainingError(f"{decision.why.removesuffix('.')}.{happened}")
        problem.exit_code = decision.code if restarts is None else TrainingError.exit_code
        raise problem
