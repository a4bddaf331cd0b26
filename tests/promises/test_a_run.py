"""A run: how it is started, continued, left alone and refused."""


def test_a_finished_run_is_left_alone(cpt, recipe, write):
    file = write(recipe)
    assert cpt("train", file).returncode == 0
    weights = next((file.parent / "runs/run").rglob("model.safetensors"))
    before = weights.stat().st_mtime_ns
    assert cpt("train", file).returncode == 0
    assert weights.stat().st_mtime_ns == before
