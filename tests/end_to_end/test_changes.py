"""A changed run has the same rows and learning rates under every engine, and with other numbers of processes."""

import pytest
from launching import launch_to_its_end, losses, zero_profile
from resuming import forget_after
from tiny import write_recipe

WORDS = ("--change", "data.sources.0.weight=0.2", "optimizer.learning_rate=1e-3", "budget.tokens=3072")
ENGINES = ("plain", "zero2", "zero3", "fsdp")


def changed(sections, folder, *, processes, engine="plain"):
    """The losses of a run of 8 steps that is changed at step 4 and then has 12."""
    folder.mkdir()
    training = {**sections["training"]}
    if engine.startswith("zero"):
        training["deepspeed"] = zero_profile(folder, int(engine[-1]))
    elif engine == "fsdp":
        training["fsdp"] = True
    sections = {**sections, "training": training, "output_dir": str(folder / "runs")}
    recipe = write_recipe({**sections, "checkpoints": {"every_steps": 4, "keep": None}}, folder / "tiny.yaml")
    launch_to_its_end(recipe, processes=processes[0])
    forget_after(folder / "runs/tiny", 4)
    launch_to_its_end(recipe, processes=processes[1], arguments=WORDS)
    found = losses(folder / "runs/tiny")
    assert len(found) == 12
    return found


@pytest.mark.slow
def test_a_changed_run_has_the_losses_of_one_process_under_every_engine(tiny_recipe, tmp_path):
    alone = changed(tiny_recipe, tmp_path / "alone", processes=(1, 1))
    assert changed(tiny_recipe, tmp_path / "fewer", processes=(2, 1)) == pytest.approx(alone, rel=1e-4)
    for engine in ENGINES:
        found = changed(tiny_recipe, tmp_path / engine, processes=(2, 2), engine=engine)
        assert found == pytest.approx(alone, rel=1e-4), engine
