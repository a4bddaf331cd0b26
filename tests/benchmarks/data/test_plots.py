import json

import pytest
from PIL import Image

from benchmarks.data.plots import PICTURES, draw
from benchmarks.data.results import RESULTS


@pytest.fixture(scope="module")
def results():
    return json.loads((RESULTS / "data.json").read_text())


def test_every_picture_of_the_readme_is_drawn_opaque_on_white(results, tmp_path):
    drawn = draw(results, tmp_path)
    assert sorted(path.name for path in drawn) == sorted(path.name for path in PICTURES.glob("data_*.png"))
    for path in drawn:
        picture = Image.open(path).convert("RGBA")
        assert picture.width >= 900
        assert picture.getpixel((0, 0)) == (255, 255, 255, 255)
        assert len(picture.getcolors(2**20)) > 10, "nothing is drawn"


def test_results_without_peers_leave_their_pictures_out(results, tmp_path):
    alone = {
        **results,
        "systems": {"ours": results["systems"]["ours"]},
        "growth": [],
        "resume_replay": {},
        "shuffle": {"failed": "no"},
    }
    assert draw(alone, tmp_path) == []
