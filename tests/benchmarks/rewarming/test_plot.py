import json

import pytest
from PIL import Image

from benchmarks.rewarming.plot import MARKS, draw
from benchmarks.rewarming.results import RESULTS
from benchmarks.rewarming.training import ARMS, BASE


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_every_arm_is_drawn_in_its_colour_on_white(results, tmp_path):
    draw(results, tmp_path / "picture.png")
    picture = Image.open(tmp_path / "picture.png").convert("RGB")
    assert picture.width >= 900 and picture.getpixel((0, 0)) == (255, 255, 255)
    colors = {color for _, color in picture.getcolors(2**20)}
    assert set(MARKS) == {BASE, *ARMS}
    for color, _ in MARKS.values():
        assert tuple(bytes.fromhex(color.removeprefix("#"))) in colors


def test_one_seed_and_one_shift_are_drawn_too(results, tmp_path):
    first = results["shifts"][0]["name"]
    arms = {
        arm: {
            kind: {"mean": figures[kind]["mean"], "reach": None, "values": figures[kind]["values"][:1]}
            for kind in ("domain", "general")
        }
        for arm, figures in results["arms"][first].items()
    }
    draw({"shifts": results["shifts"][:1], "arms": {first: arms}}, tmp_path / "picture.png")
    assert len(Image.open(tmp_path / "picture.png").convert("RGB").getcolors(2**20)) > 10
