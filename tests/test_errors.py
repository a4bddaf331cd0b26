import inspect

from cpt import errors


def test_every_error_is_a_cpt_error_that_says_its_remedy():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert {kind.__name__ for kind in kinds} == {
        "CptError",
        "RecipeError",
        "DataError",
        "CheckpointError",
        "ResourceError",
        "TrainingError",
        "LaunchError",
        "RehearsalError",
        "UserCodeError",
        "Interrupted",
        "RestartNeeded",
    }
    assert all(issubclass(kind, errors.CptError) and kind.__doc__ for kind in kinds)
