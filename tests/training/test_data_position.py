import json
from types import SimpleNamespace

import pytest
from tiny import write_documents, write_recipe

from cpt.data.rows.build import build_data
from cpt.data.rows.mixture import RowsOfSteps
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer
from cpt.training.resuming import POSITION, DataPosition


@pytest.fixture
def data(tiny_recipe, tmp_path, monkeypatch):
    """Of one source in several windows."""
    monkeypatch.setenv("CPT_WORKERS", "1")
    tiny_recipe["data"] |= {
        "sources": [{"path": str(write_documents(tmp_path / "d.jsonl", 300, seed=1))}],
        "window_bytes": 20_000,
    }
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)

    def build(cache="cache"):
        return build_data(recipe.data, tokenizer, seed=recipe.seed, cache_dir=tmp_path / cache)

    return build


def arguments(folder, step=0, *, is_main=True):
    return SimpleNamespace(output_dir=folder, local_process_index=0 if is_main else 1), SimpleNamespace(
        global_step=step, is_world_process_zero=is_main
    )


def test_windows_are_made_while_the_run_trains_by_one_process_of_a_machine(data, tmp_path):
    prepared = data()
    callback, other = DataPosition(prepared, RowsOfSteps(4)), DataPosition(prepared, RowsOfSteps(4))
    callback.on_train_begin(*arguments(tmp_path), None)
    other.on_train_begin(*arguments(tmp_path, is_main=False), None)
    assert callback.ahead is not None and other.ahead is None
    callback.ahead.thread.join(60)
    callback.on_train_end(*arguments(tmp_path), None)
    assert data().windowed[0].is_complete


def test_a_checkpoint_tells_the_next_row_and_another_store_goes_on_there(data, tmp_path):
    prepared = data()
    rows = [prepared.rows[row]["input_ids"].tolist() for row in range(80, 90)]
    (tmp_path / POSITION).write_text(DataPosition(prepared, RowsOfSteps(4)).texts(80)[POSITION])
    assert json.loads((tmp_path / POSITION).read_text())["row"] == 80
    empty = data("empty")
    empty.restore(json.loads((tmp_path / POSITION).read_text()))
    assert [empty.rows[row]["input_ids"].tolist() for row in range(80, 90)] == rows
