import json

import pytest

from cpt.evaluation.verdict import ExampleSet, read_example_sets


def written(path, *logs):
    path.write_text("".join(json.dumps(log) + "\n" for log in logs))
    return path


def evaluation(step, **figures):
    return {"step": step, "tokens": step, **{f"eval_pairs_{name}": value for name, value in figures.items()}}


def dpo(step, chosen, accuracy, margin):
    of_rewards = {
        "rewards/chosen": chosen,
        "logps/chosen": -200.0,
        "rewards/accuracies": accuracy,
        "rewards/margins": margin,
    }
    return evaluation(step, examples=40, loss=0.69, **of_rewards)


def test_pairs_of_a_run_with_a_reference_are_held_against_chance(tmp_path):
    logs = [
        dpo(0, 0.004, 0.4, 1e-3),
        {"step": 5, "tokens": 5, "loss": 0.5},
        dpo(5, 0.3, 0.6, 0.2),
        dpo(9, 0.4, 0.9, 0.5),
    ]
    (found,) = read_example_sets(written(tmp_path / "metrics.jsonl", *logs))
    assert (
        found.has_reference
        and found.worked
        and (found.examples, found.accuracy, found.margin) == (40, (0.4, 0.9), (1e-3, 0.5))
    )
    assert (
        found.sentence()
        == "It worked: in 90 % of 40 held-out pairs (95 % interval 77 to 96 %) the better answer has the higher"
        " reward; half would be chance."
    )


@pytest.mark.parametrize(
    ("accuracy", "worked", "said"),
    [(0.55, None, "Whether it worked is unknown: in 55 %"), (0.1, False, "It did harm: in 10 %")],
)
def test_pairs_that_are_not_told_apart_are_no_success(accuracy, worked, said):
    found = ExampleSet("pairs", 40, (0.7, 0.7), (0.0, accuracy), has_reference=True)
    assert found.worked is worked and found.sentence().startswith(said)


def test_a_new_head_is_held_against_chance_too(tmp_path):
    logs = [
        evaluation(step, examples=40, loss=0.7, accuracy=accuracy, margin=0.1)
        for step, accuracy in ((0, 0.8), (9, 0.9))
    ]
    (found,) = read_example_sets(written(tmp_path / "metrics.jsonl", *logs))
    assert found.is_new_head and found.worked and not found.has_reference


def test_without_a_reference_it_is_told_what_was_before():
    found = ExampleSet("pairs", 40, (5.0, 4.0), (0.25, 0.5), (0.1, 0.2))
    assert found.worked is None
    assert (
        found.sentence()
        == "In 50 % of 40 held-out pairs (95 % interval 35 to 65 %) the better answer is the likelier one; before the"
        " run in 25 %."
    )


def test_rewards_and_margins_have_no_interval_and_claim_nothing(tmp_path):
    logs = [evaluation(0, examples=8, reward=0.25), evaluation(4, examples=8, reward=0.75)]
    (found,) = read_example_sets(written(tmp_path / "metrics.jsonl", *logs))
    assert found.worked is None
    assert (
        found.sentence()
        == "On 8 held-out examples the mean reward went from 0.250 to 0.750; no interval can be given."
    )


def test_a_run_that_was_not_evaluated_before_it_began_has_none(tmp_path):
    assert read_example_sets(tmp_path / "metrics.jsonl") == []
    assert read_example_sets(written(tmp_path / "metrics.jsonl", dpo(5, 0.3, 0.6, 0.2), dpo(9, 0.4, 0.9, 0.5))) == []
