import pytest

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import Gpu
from cpt.planner.machines import Machines, machines_that_are_meant, refuse_too_many
from cpt.recipe.schema import Recipe

HERE = [Gpu("NVIDIA L4", 24, 23, "550", "8.9")] * 4


def recipe(**training):
    return Recipe.model_validate(
        {
            "name": "run",
            "stage": "pretrain",
            "model": {"path": "nowhere"},
            "data": {"sequence_length": 1024, "sources": [{"path": "documents"}]},
            "budget": {"tokens": 10**9, "global_batch_tokens": 16 * 1024},
            "training": training,
        }
    )


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes", "each", "meant"),
    [
        ("H100", None, 1, None, Machines("H100", 1, 1)),
        ("H100", 4, 1, None, Machines("H100", 1, 4)),
        ("H100", None, 2, 8, Machines("H100", 2, 8)),
        ("H100", 16, 2, None, Machines("H100", 2, 8)),
        ("H100", 16, 2, 8, Machines("H100", 2, 8)),
        (None, None, 2, None, Machines("NVIDIA L4", 2, 4)),
        ("cpu", 2, 1, None, Machines("cpu", 1, 2)),
    ],
)
def test_what_was_written_and_what_is_here(gpu, gpus, nodes, each, meant):
    assert machines_that_are_meant(gpu, gpus, nodes, each, HERE) == meant


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("H100", 8, 3, 4), "--gpus 8 contradicts --nodes 3 x --gpus-per-node 4 = 12"),
        (("H100", 9, 2, None), "not the same number in each"),
        (("H100", None, 2, None), "--gpus-per-node 8"),
        (("cpu", None, 2, None), "--gpu cpu"),
        ((None, None, 1, None), "no GPU"),
    ],
)
def test_what_contradicts_itself_is_refused(words, complaint):
    with pytest.raises(ResourceError, match=complaint):
        machines_that_are_meant(*words, [])


def test_links_of_a_cpu_are_not_dropped_in_silence():
    with pytest.raises(ResourceError, match="Leave out --nodes and --links"):
        machines_that_are_meant("cpu", 2, 1, None, [], "ethernet10")


def test_a_step_needs_a_row_for_each_process():
    refuse_too_many(recipe(), Machines("H100", 2, 8))
    with pytest.raises(RecipeError, match="16 rows of 1,024 tokens, fewer than the 32.*steps of 32,768 tokens"):
        refuse_too_many(recipe(), Machines("H100", 4, 8))


def test_processes_that_share_rows_need_fewer():
    refuse_too_many(recipe(parallelism_config={"sp_size": 2}), Machines("H100", 4, 8))
