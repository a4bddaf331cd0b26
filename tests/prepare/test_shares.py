import pytest

from cpt.data.store.shares import Share
from cpt.errors import RecipeError
from cpt.prepare.shares import share_of


def test_a_share_is_the_workers_number_of_how_many():
    assert share_of("3/16") == Share(3, 16) and str(Share(3, 16)) == "3/16"


@pytest.mark.parametrize("words", ["0/4", "5/4", "3", "a/b", "1/2/3", ""])
def test_what_is_no_share_is_told(words):
    with pytest.raises(RecipeError, match="from 1 on"):
        share_of(words)


@pytest.mark.parametrize(
    ("number", "first", "count", "step", "expected"),
    [(0, 0, 16, 1, (1, 16)), (16, 1, 16, 1, (16, 16)), (7, 7, 1, 1, (1, 1)), (9, 1, 5, 4, (3, 5))],
)
def test_a_slurm_array_says_it_too(number, first, count, step, expected):
    environment = {
        "SLURM_ARRAY_TASK_ID": number,
        "SLURM_ARRAY_TASK_MIN": first,
        "SLURM_ARRAY_TASK_COUNT": count,
        "SLURM_ARRAY_TASK_STEP": step,
    }
    assert share_of("array", {name: str(value) for name, value in environment.items()}) == Share(*expected)


def test_outside_an_array_what_is_missing_is_named():
    with pytest.raises(RecipeError, match="sbatch --array=1-16.*SLURM_ARRAY_TASK_ID"):
        share_of("array", {})
