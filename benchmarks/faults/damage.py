"""Every file of a checkpoint, damaged in five ways: a start must fall back to an older one and say so."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.faults.comparing import same_weights
from benchmarks.faults.runs import KINDS, TrialRun
from benchmarks.faults.trials import Outcome, Suite, last_error, told, tried_once
from cpt.checkpoints.resume import choose_checkpoint
from tests.tiny_run import DAMAGES, damage

STEPS, EVERY, DAMAGED = 12, 4, 8


def damage_everything(suite: Suite) -> list[dict[str, Any]]:
    """Both systems, by kind of damage; with ours also what the chooser of checkpoints says of every file in every
    way."""
    found = []
    for stage in suite.stages:
        for system in suite.systems:
            straight = suite.straight("damage", system, stage, steps=STEPS, every=EVERY)
            names = files_of(straight.folder / f"checkpoint-{DAMAGED}")
            if system == "cpt":
                found += [
                    told(f"{how}: chosen", KINDS[stage], system, chosen(straight, names, how))
                    for how in DAMAGES
                ]
            outcomes = defaultdict(list)
            for number, name in enumerate(names):
                for how in DAMAGES if system == "trainer" else [DAMAGES[number % len(DAMAGES)]]:
                    outcomes[how].append(tried_once(started, suite, straight, name, how))
            found += [
                told(how, KINDS[stage], system, outcomes[how]) for how in DAMAGES if outcomes[how]
            ]
    return found


def files_of(checkpoint: Path) -> list[str]:
    """Paths from its folder."""
    return sorted(
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    )


def chosen(straight: TrialRun, names: list[str], how: str) -> list[Outcome]:
    """Which checkpoint ours would go on from, for each file damaged in this way."""
    outcomes = []
    for name in names:
        copy = straight.home / "copy"
        shutil.copytree(
            straight.folder, copy, ignore=shutil.ignore_patterns(f"checkpoint-{STEPS}", "final")
        )
        damage(copy / f"checkpoint-{DAMAGED}" / name, how)
        try:
            point = choose_checkpoint(copy).checkpoint
            fell_back = (
                point == copy / f"checkpoint-{DAMAGED - EVERY}"
                and (copy / f"bad-checkpoint-{DAMAGED}").is_dir()
            )
            outcomes.append(
                Outcome(
                    fell_back, "put aside, an older one is used" if fell_back else f"silent: {name}"
                )
            )
        except Exception as problem:  # whatever it is, it would end a start that an older checkpoint could have served
            outcomes.append(Outcome(False, f"crash: {name}: {problem!r}"[:160]))
        shutil.rmtree(copy)
    return outcomes


def started(suite: Suite, straight: TrialRun, name: str, how: str) -> Outcome:
    """What a real start makes of it."""
    run = suite.run("damaged", straight.system, straight.stage, steps=STEPS, every=EVERY)
    copy_until(straight, run, DAMAGED)
    damage(run.folder / f"checkpoint-{DAMAGED}" / name, how)
    code = run.finish()
    if code != 0:
        return Outcome(False, f"crash: {last_error(run.said())}")
    same = same_from_there(run, straight)
    fell_back = min(run.made(), default=STEPS) <= DAMAGED
    shutil.rmtree(run.home)
    if same:
        return Outcome(
            True, "fell back, bit for bit the undisturbed run" if fell_back else "harmless"
        )
    return Outcome(False, "silent: another run")


def copy_until(straight: TrialRun, run: TrialRun, step: int) -> None:
    """The undisturbed run as it was after a step; its recipe names the folder, so that is made the new one's."""
    later = [f"checkpoint-{number}" for number in straight.checkpoints() if number > step]
    shutil.copytree(
        straight.folder,
        run.folder,
        ignore=shutil.ignore_patterns("final", "status.json", "recipe.yaml", *later),
    )
    recipe = straight.folder / "recipe.yaml"
    if recipe.exists():
        (run.folder / "recipe.yaml").write_text(
            recipe.read_text().replace(str(straight.home), str(run.home))
        )


def same_from_there(run: TrialRun, straight: TrialRun) -> bool:
    """Whether the steps that were made, and the weights, are those of the undisturbed run."""
    expected = straight.made()
    return same_weights(run, straight) and all(
        expected.get(step) == made for step, made in run.made().items()
    )
