"""What can go wrong for a user: one class per remedy."""


class CptError(Exception):
    """The message says what is wrong, where, and what to do; it is printed without a traceback, exit code 2."""


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
