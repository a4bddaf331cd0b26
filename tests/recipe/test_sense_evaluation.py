import pytest

from cpt.recipe.schema import Evaluation
from cpt.recipe.sense_evaluation import with_public_set

HELD = "perplexity: [{path: a/b, name: code}, {path: a/c, name: prose}]"


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        (
            f"{{{HELD}, retain: {{prosa: null}}}}",
            "no held-out set is called `prosa`. Did you mean `prose`? There is: code, prose. A public general",
        ),
        (
            "{retain: {general: null}}",
            "There is: none. A public general set, for `evaluation.perplexity`: `{path: HuggingFaceFW/fineweb-edu",
        ),
        (
            f"{{{HELD}, retain: {{prose: null, code: null}}}}",
            "names every held-out set: none is left to show what is learnt",
        ),
        (
            f"{{{HELD}, retain: {{prose: 0.02}}}}",
            "`evaluation.retain.prose` never stops the run: it is only evaluated before and after",
        ),
    ],
)
def test_a_contradiction_is_told(mistakes, evaluation, said):
    lines = mistakes(f"evaluation: {evaluation}\n")
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(
    "evaluation",
    [f"{{{HELD}, retain: {{prose: null}}}}", f"{{{HELD}, retain: {{prose: 0.02}}, every_steps: 5}}", f"{{{HELD}}}"],
)
def test_what_fits_together_passes(load, evaluation):
    load(f"evaluation: {evaluation}\n")


def test_held_out_shares_have_their_sources_names(load):
    load(
        "evaluation: {held_out_share: 0.1, retain: {general: null}}\n",
        "data.sources=[{path: a/b, name: general}, {path: a/c}]",
    )


@pytest.mark.parametrize("value", ["0", "-0.1", "much"])
def test_a_rise_is_a_number_above_0(mistakes, value):
    assert "evaluation.retain" in " ".join(
        mistakes(f"evaluation: {{{HELD}, retain: {{prose: {value}}}, every_steps: 5}}\n")
    )


def test_only_a_general_set_that_is_missing_gets_a_public_one_to_take():
    sets = [{"path": "a.jsonl", "name": "code"}, {"path": "b.jsonl", "name": "prose"}]
    evaluation = Evaluation.model_validate({"perplexity": sets, "retain": {"prose": None}})
    complaint = "`evaluation.perplexity[{}].path`: nothing there."
    assert with_public_set(complaint.format(0), evaluation) == complaint.format(0)
    assert with_public_set(complaint.format(1), evaluation).startswith(complaint.format(1) + " A public general set: ")
