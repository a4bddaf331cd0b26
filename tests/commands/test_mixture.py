"""`cpt mixture` says what a run will read."""

import json

import pytest
from tiny import write_recipe

from cpt.commands.mixture import forecast
from cpt.data.rows.build import build_data
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer

ROW = 64


@pytest.fixture
def predict(tiny_recipe, tmp_path):
    """`predict(64_000, phases=[...])`: the forecast of the tiny recipe and its data."""

    def run(tokens, **data):
        tiny_recipe["data"] |= data
        tiny_recipe["budget"] = {"tokens": tokens}
        recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        prepared = build_data(recipe.data, tokenizer, seed=1, evaluation=recipe.evaluation)
        return forecast(recipe, prepared), prepared

    return run


@pytest.fixture
def unweighted(tiny_recipe):
    return [{"path": source["path"]} for source in tiny_recipe["data"]["sources"]]


def test_the_forecast_is_what_the_run_reads(predict):
    forecast, prepared = predict(ROW * 1000)
    turns = [prepared.rows.turn(number)[0] for number in range(1000)]
    for number, (source, rows) in enumerate(zip(forecast.sources, prepared.sources, strict=True)):
        assert source.epochs == turns.count(number) / rows.rows
        assert source.seen == pytest.approx(source.asked, abs=0.001)
    assert forecast.is_reached and sum(source.seen for source in forecast.sources) == pytest.approx(1)


def test_phases_are_forecast_as_far_as_the_run_gets(predict, unweighted):
    domain, general = {"domain": 1, "general": 0}, {"domain": 0, "general": 1}
    phases = [
        {"until": ROW * 100, "weights": {"domain": 1}},
        {"until": ROW * 1000, "weights": {"general": 1}},
        {"weights": {"domain": 1}},
    ]
    forecast, _ = predict(ROW * 1001, sources=unweighted, phases=phases)
    ends = [(phase.first_token, phase.end_token) for phase in forecast.phases]
    assert ends == [(0, 6400), (6400, 64_000), (64_000, 64_064)]
    assert [phase.seen for phase in forecast.phases] == [domain, general, domain]
    assert forecast.sources[0].asked == pytest.approx(101 / 1001)


def test_shares_as_near_as_whole_rows_allow_are_reached(predict):
    forecast, _ = predict(ROW * 78)
    assert forecast.is_reached
    assert 0.001 < max(abs(source.seen - source.asked) for source in forecast.sources) < 2 / 78
    assert "78 whole rows" in forecast.remarks[0]


def test_the_table_and_the_json_have_the_shares(cpt, tiny_recipe, tmp_path):
    tiny_recipe["budget"] = {"tokens": ROW * 1000}
    path = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    code, said = cpt("mixture", path)
    assert code == 0 and "70.00%" in said and "The mixture is reached" in said
    code, said = cpt("mixture", path, "--json")
    found = json.loads(said)
    domain = found["sources"][0]
    assert code == 0 and found["rows"] == 1000 and domain["asked"] == pytest.approx(0.7)
    assert domain["documents"] == sum(domain["lengths"].values()) == 120


def test_a_phase_until_a_learning_rate_reads_like_one_until_that_token(cpt, tiny_recipe, unweighted, tmp_path):
    weights = {"domain": 1, "general": 3}
    phases = [{"until_learning_rate": 0.2, "weights": weights}, {"weights": {"domain": 1}}]
    tiny_recipe["data"] |= {"sources": unweighted, "phases": phases}
    tiny_recipe |= {"budget": {"tokens": 64_000}, "schedule": {"name": "linear", "warmup_tokens": 6400}}
    by_rate = json.loads(cpt("mixture", write_recipe(tiny_recipe, tmp_path / "r.yaml"), "--json")[1])
    end = ROW * round((64_000 - 0.2 * (64_000 - 6400)) / ROW)
    first, second = by_rate["phases"]
    assert first["end_token"] == second["first_token"] == end and first["until_learning_rate"] == 0.2
    assert first["seen"]["general"] == pytest.approx(0.75, abs=0.002) and second["seen"]["general"] == 0
    phases[0] = {"until": end, "weights": weights}
    by_token = json.loads(cpt("mixture", write_recipe(tiny_recipe, tmp_path / "r.yaml"), "--json")[1])
    assert by_token["sources"] == by_rate["sources"]
