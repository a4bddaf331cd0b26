"""With a Hub that answers, what is there is checked; without one, it is reported as not checked."""

import json

import pytest
from loopback_hub import Client, Hub
from tiny import write_recipe

REPORT = """
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe
found = check_reality(load_recipe({path!r}))
result = {{"mistakes": [str(each) for each in (*found.mistakes, *found.blockers)], "unchecked": found.unchecked, "code": found.exit_code}}
"""  # noqa: E501


@pytest.fixture
def checked(tiny_recipe, tmp_path):
    """What the gate finds in the tiny recipe with one source on a Hub."""
    hub = Hub()
    hub.commit("lab/texts", {"train.jsonl": "".join(json.dumps({"body": f"Text {n}."}) + "\n" for n in range(50))})
    client = Client(hub, tmp_path / "home")

    def of_source(**source):
        data = {**tiny_recipe["data"], "sources": [source]}
        return client(REPORT.format(path=str(write_recipe({**tiny_recipe, "data": data}, tmp_path / "r.yaml"))))

    yield of_source
    client.close()
    hub.shutdown()


@pytest.mark.slow
def test_a_dataset_on_a_hub_that_answers_is_checked(checked):
    sound = checked(path="lab/texts", text_column="body")
    assert sound == {"mistakes": [], "unchecked": [], "code": 0}
    without_column = checked(path="lab/texts")
    assert without_column["code"] == 2 and "no column `text`" in without_column["mistakes"][0]
    missing = checked(path="lab/nothing")
    assert missing["code"] == 2 and "lab/nothing" in missing["mistakes"][0]
