import json

import pytest
from tiny_search import recipe_in, space_in

from cpt.errors import RecipeError
from cpt.search.figures import Tail, is_compared_on_the_way, refuse_unlogged_metric


def evaluated(tiny_recipe, corpus, **evaluation):
    held_out = [{"path": str(corpus / "held_out.jsonl"), "name": "papers"}]
    return {**tiny_recipe, "evaluation": {"perplexity": held_out, **evaluation}}


def test_a_figure_that_no_run_logs_is_refused_with_those_that_are(tiny_recipe, corpus, tmp_path):
    _, recipe, _ = recipe_in(tmp_path, evaluated(tiny_recipe, corpus))
    refuse_unlogged_metric(space_in(tmp_path, metric="eval_papers_bits_per_byte"), recipe)
    refuse_unlogged_metric(space_in(tmp_path, metric="loss"), recipe)
    with pytest.raises(RecipeError, match=r"space.yaml:1: .*Did you mean `eval_papers_bits_per_byte`"):
        refuse_unlogged_metric(space_in(tmp_path, metric="eval_paper_bits_per_byte"), recipe)
    with pytest.raises(RecipeError, match="no run of this recipe logs `reward`"):
        refuse_unlogged_metric(space_in(tmp_path, metric="reward"), recipe)


def test_a_run_that_ends_before_its_first_log_is_refused(tiny_recipe, tmp_path):
    _, recipe, _ = recipe_in(tmp_path, tiny_recipe, training={**tiny_recipe["training"], "logging_steps": 50})
    with pytest.raises(RecipeError, match=r"it has 8 steps, and `training.logging_steps` is 50. Set it lower"):
        refuse_unlogged_metric(space_in(tmp_path, metric="loss"), recipe)


def test_nothing_held_out_has_no_figure(tiny_recipe, tmp_path):
    _, recipe, _ = recipe_in(tmp_path, tiny_recipe)
    with pytest.raises(RecipeError, match=r"holds nothing out. Give it `evaluation.held_out_share`"):
        refuse_unlogged_metric(space_in(tmp_path, metric="eval_papers_loss"), recipe)


def test_sources_of_which_a_share_is_held_out_are_sets(tiny_recipe, tmp_path):
    _, recipe, _ = recipe_in(tmp_path, tiny_recipe, evaluation={"held_out_share": 0.1})
    refuse_unlogged_metric(space_in(tmp_path, metric="eval_domain_perplexity"), recipe)


def test_a_pruner_needs_values_on_the_way(tiny_recipe, corpus, tmp_path):
    _, recipe, _ = recipe_in(tmp_path, evaluated(tiny_recipe, corpus))
    pruned = space_in(tmp_path, metric="eval_papers_loss", pruner="median")
    with pytest.raises(
        RecipeError, match=r"measured before and after alone. Give the recipe `evaluation.every_tokens`"
    ):
        refuse_unlogged_metric(pruned, recipe)
    _, often, _ = recipe_in(tmp_path, evaluated(tiny_recipe, corpus, every_steps=2))
    refuse_unlogged_metric(pruned, often)
    assert is_compared_on_the_way(pruned.settings, often) and not is_compared_on_the_way(pruned.settings, recipe)


def test_values_are_read_as_they_come(tmp_path):
    tail = Tail(tmp_path, "loss")
    assert tail.new_values() == []
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write('{"tokens": 10, "loss": 3.0}\n{"tokens": 10, "eval_a_loss": 1}\nrubbish\n{"tokens": 20, "lo')
        file.flush()
        assert tail.new_values() == [(10, 3.0)]
        file.write('ss": 2.5}\n')
        file.flush()
        assert tail.new_values() == [(20, 2.5)] and tail.new_values() == [] and tail.last == 2.5


def test_a_run_that_goes_back_to_a_checkpoint_is_read_again(tmp_path):
    lines = [json.dumps({"tokens": tokens, "loss": tokens / 10}) + "\n" for tokens in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    tail = Tail(tmp_path, "loss")
    assert len(tail.new_values()) == 3
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    assert tail.new_values() == [(10, 1.0)]


def test_what_is_no_finite_number_is_seen_and_not_compared(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"tokens": 10, "loss": 3.0}\n{"tokens": 20, "loss": NaN}\n{"tokens": 30, "loss": "x"}\n'
    )
    tail = Tail(tmp_path, "loss")
    assert tail.new_values() == [(10, 3.0)] and str(tail.last) == "nan"
