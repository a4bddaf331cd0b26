import pytest
from tiny import write_recipe

from cpt.commands.mixture import forecast
from cpt.data.rows.build import build_data
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture
def told(tiny_recipe, tmp_path):
    """The forecast of the tiny recipe with other data keys and another budget."""

    def run(tokens, **data):
        tiny_recipe["data"] |= data
        tiny_recipe["budget"] = {"tokens": tokens}
        recipe: Recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
        prepared = build_data(
            recipe.data, load_tokenizer(recipe.tokenizer, recipe.model), seed=1, evaluation=recipe.evaluation
        )
        return forecast(recipe, prepared), prepared

    return run


def two(tiny_recipe):
    return [{"path": source["path"]} for source in tiny_recipe["data"]["sources"]]


def test_what_is_seen_is_what_the_run_reads(told):
    forecast, prepared = told(64 * 1000)
    counts = [0, 0]
    for number in range(1000):
        counts[prepared.rows.turn(number)[0]] += 1
    for source, count, rows in zip(forecast.sources, counts, prepared.sources, strict=True):
        assert source.epochs == count / rows.rows and source.seen == pytest.approx(source.asked, abs=0.001)
    assert forecast.is_reached and sum(source.seen for source in forecast.sources) == pytest.approx(1)


def test_phases_are_told_as_far_as_the_run_gets(told, tiny_recipe):
    phases = [
        {"until": 6400, "weights": {"domain": 1}},
        {"until": 64_000, "weights": {"general": 1}},
        {"weights": {"domain": 1}},
    ]
    forecast, _ = told(64_000 + 64, sources=two(tiny_recipe), phases=phases)
    assert [(phase.first_token, phase.end_token) for phase in forecast.phases] == [
        (0, 6400),
        (6400, 64_000),
        (64_000, 64_064),
    ]
    assert [phase.seen for phase in forecast.phases] == [
        {"domain": 1, "general": 0},
        {"domain": 0, "general": 1},
        {"domain": 1, "general": 0},
    ]
    assert forecast.sources[0].asked == pytest.approx(101 / 1001)


def test_a_phase_that_is_shorter_than_a_row_is_not_reached(told, tiny_recipe):
    phases = [{"until": 30, "weights": {"domain": 1}}, {"weights": {"general": 1}}]
    forecast, _ = told(64_000, sources=two(tiny_recipe), phases=phases)
    assert not forecast.is_reached and forecast.remarks[0].startswith(
        "`data.phases[0]` is shorter than a row of 64 tokens"
    )


def test_a_run_too_short_for_one_row_of_a_source_is_not_reached(told):
    forecast, _ = told(64 * 3)
    assert (
        not forecast.is_reached
        and "The run has 3 rows, too few for a row of general (30.00% asked)." in forecast.remarks[0]
    )


def test_shares_as_near_as_whole_rows_allow_are_reached_and_the_difference_is_told(told):
    forecast, _ = told(64 * 78)
    assert forecast.is_reached
    off = [abs(source.seen - source.asked) for source in forecast.sources]
    assert 0.001 < max(off) < 2 / 78
    assert "as near as 78 whole rows allow, each one 1.28% of the run: domain" in forecast.remarks[0]
