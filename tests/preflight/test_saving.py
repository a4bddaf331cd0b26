import pytest

from cpt.errors import RecipeError, ResourceError
from cpt.preflight import gate
from cpt.preflight.saving import check_saving


@pytest.mark.parametrize(
    ("sections", "kind", "complaint"),
    [
        (
            {"checkpoints": {"every_steps": 1, "keep": {"lasst": 2}}},
            RecipeError,
            "`checkpoints.keep.lasst` is not an option of newest",
        ),
        (
            {"checkpoints": {"every_steps": 1, "keep": {"name": "newst"}}},
            RecipeError,
            "no rule called `newst`. Did you mean `newest`?",
        ),
        (
            {"checkpoints": {"archive": "nowhere://x"}},
            RecipeError,
            "`checkpoints.archive`: nowhere://x: Protocol not known",
        ),
        ({"checkpoints": {"archive": "adl://x/y"}}, ResourceError, "`checkpoints.archive`: adl://x/y needs a package"),
        ({"checkpoints": {"archive": "/proc/archive"}}, RecipeError, "`checkpoints.archive`: cannot write to /proc"),
    ],
)
def test_what_cannot_be_done_is_a_mistake_at_the_gate(load, sections, kind, complaint):
    with pytest.raises(kind, match=complaint):
        check_saving(load(**sections))
    found = gate.check_reality(load(**sections))
    assert any(isinstance(problem, kind) for problem in (*found.mistakes, *found.blockers))


@pytest.mark.parametrize("archive", ["memory://runs", "archive/of/runs", None])
def test_any_storage_that_is_there_will_do(load, archive):
    check_saving(load(checkpoints={"every_steps": 1, "keep": None, "archive": archive}))
