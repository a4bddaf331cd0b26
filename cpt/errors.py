"""What can go wrong for a user: one class per remedy."""

DISTRIBUTION = "continued-pretraining"  # the name for pip; the command and the package are cpt


def install_line(extra: str) -> str:
    """What installs the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class CptError(Exception):
    """The message says what is wrong, where, and what to do; it is printed without a traceback."""

    exit_code = 2


class RecipeError(CptError):
    """Edit the recipe: it asks for something that does not exist or does not fit together."""


class DataError(CptError):
    """Fix the files: a source is missing, empty, or not in the shape that the stage needs."""


class CheckpointError(CptError):
    """Choose another checkpoint, or repair this one: it is incomplete, damaged, or from another recipe."""


class ResourceError(CptError):
    """Use something smaller, or install what is missing."""


class TrainingError(CptError):
    """The run itself went wrong: it diverged, or used up what it was allowed to lose."""


class LaunchError(CptError):
    """Start it another way: processes, hosts or ports are not what the launch promised."""


class RehearsalError(CptError):
    """Mend what the rehearsal found before the run is started; each of its rows names the remedy."""


class UserCodeError(CptError):
    """Fix your own function: the recipe names it, and it raised an error. The message ends with its traceback."""


class Interrupted(CptError):  # noqa: N818 - it is no error of anybody
    """Start it again as it was: it was stopped by a signal, and resumes from its checkpoint."""

    exit_code = 75  # EX_TEMPFAIL: what schedulers take for "put it into the queue again"


class RestartNeeded(Interrupted):
    """Start it again: what the run learned only takes effect in new processes. `cpt train` and its launchers do so
    automatically."""

    exit_code = 76
