"""Errors for users: one class per remedy."""

DISTRIBUTION = "continued-pretraining"  # the name on PyPI; the command and the package are cpt


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class CptError(Exception):
    """The message says what is wrong, where, and what to do; it is printed without a traceback."""

    exit_code = 2


class RecipeError(CptError):
    """Edit the recipe: it contains something unknown or contradictory."""


class DataError(CptError):
    """Fix the files: a source is missing, empty, or not in the shape that the stage needs."""


class CheckpointError(CptError):
    """Choose another checkpoint, or repair this one: it is incomplete, damaged, or from another recipe."""


class ResourceError(CptError):
    """Use something smaller, or install what is missing."""


class TrainingError(CptError):
    """The training failed: it diverged, or exceeded its limits of skipped steps or restarts."""


class LaunchError(CptError):
    """Start it differently: processes, hosts or ports do not match the launch."""


class RehearsalError(CptError):
    """Fix the failures of the rehearsal before starting the run; each row has a remedy."""


class UserCodeError(CptError):
    """Fix your own function: the recipe names it, and it raised an error. The message ends with its traceback."""


class Interrupted(CptError):  # noqa: N818 - not an error
    """Repeat the same command: the run was stopped by a signal, and resumes from its checkpoint."""

    exit_code = 75  # EX_TEMPFAIL: schedulers requeue jobs with this code


class RestartNeeded(Interrupted):
    """Start it again: a setting changed that needs new processes. `cpt train` and its launchers do so
    automatically."""

    exit_code = 76
