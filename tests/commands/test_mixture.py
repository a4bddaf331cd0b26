"""`cpt mixture` says what a run will read."""

import json

import pytest
from tiny import write_recipe

from cpt.analysis.forecast import forecast
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
    assert forecast.is_reached and sum(source.seen for source in forecast.sources) == pytest.approx(
        1
    )


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


def test_of_a_run_whose_mixture_changed_the_rows_between_the_changes_are_counted(
    cpt, tiny_recipe, tmp_path
):
    run, (domain, general) = tmp_path / "run", tiny_recipe["data"]["sources"]
    (run / "checkpoint-30").mkdir(parents=True)
    recipes = []
    for sources in ([domain], [domain, general], [general]):
        tiny_recipe["data"]["sources"] = sources
        recipes.append(
            load_recipe(write_recipe(tiny_recipe, run / "recipe.yaml")).model_dump(
                mode="json", by_alias=True
            )
        )
    position = {"row": 100, "positions": {"domain": {"rows": 70}, "general": {"rows": 30}}}
    lines = [
        {"step": 5, "row": 20, "positions": {}, "recipe": {}, "new_stretch": False},
        {
            "step": 10,
            "row": 40,
            "positions": {"domain": {"rows": 40}},
            "recipe": recipes[0],
            "new_stretch": True,
        },
        {"step": 20, **position, "recipe": recipes[1], "new_stretch": True},
    ]
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    position["positions"]["general"]["rows"] += 20
    (run / "checkpoint-30/trainer_state.json").write_text("{}")
    (run / "checkpoint-30/data_position.json").write_text(json.dumps({**position, "row": 120}))
    code, said = cpt("mixture", run, "--json")
    found = [
        [one[key] for key in ("first_step", "end_row", "name", "rows", "change")]
        for one in json.loads(said)
    ]
    assert code == 0 and found == [
        [1, 40, "domain", 40, ""],
        [11, 100, "domain", 30, ""],
        [11, 100, "general", 30, "added"],
        [21, 120, "general", 20, ""],
        [21, 120, "domain", 0, "retired"],
    ]
    assert [round(one["asked"] or 0, 2) for one in json.loads(said)] == [1, 0.7, 0.3, 1, 0]
    code, said = cpt("mixture", run)
    assert code == 0 and "11-20" in said and "retired" in said
    (run / "status.json").write_text("{}")
    assert f"Did you mean {run}?" in cpt("mixture", f"{run}s")[1]


def test_a_phase_until_a_learning_rate_reads_like_one_until_that_token(
    cpt, tiny_recipe, unweighted, tmp_path
):
    weights = {"domain": 1, "general": 3}
    phases = [{"until_learning_rate": 0.2, "weights": weights}, {"weights": {"domain": 1}}]
    tiny_recipe["data"] |= {"sources": unweighted, "phases": phases}
    tiny_recipe |= {
        "budget": {"tokens": 64_000},
        "schedule": {"name": "linear", "warmup_tokens": 6400},
    }
    by_rate = json.loads(
        cpt("mixture", write_recipe(tiny_recipe, tmp_path / "r.yaml"), "--json")[1]
    )
    end = ROW * round((64_000 - 0.2 * (64_000 - 6400)) / ROW)
    first, second = by_rate["phases"]
    assert (
        first["end_token"] == second["first_token"] == end and first["until_learning_rate"] == 0.2
    )
    assert (
        first["seen"]["general"] == pytest.approx(0.75, abs=0.002)
        and second["seen"]["general"] == 0
    )
    phases[0] = {"until": end, "weights": weights}
    by_token = json.loads(
        cpt("mixture", write_recipe(tiny_recipe, tmp_path / "r.yaml"), "--json")[1]
    )
    assert by_token["sources"] == by_rate["sources"]
