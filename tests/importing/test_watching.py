import pytest
from imported_configs import result


def run(make, **values):
    return make(max_steps=100, sequence_len=10, micro_batch_size=1, gradient_accumulation_steps=1, **values)


@pytest.mark.parametrize(
    ("values", "checkpoints"),
    [
        ({"save_steps": 20}, {"every_steps": 20, "keep": 4}),
        ({"save_steps": 0.25, "save_total_limit": 2}, {"every_steps": 0.25, "keep": 2}),
        ({"saves_per_epoch": 4, "num_epochs": 2}, {"every_steps": 0.125, "keep": 4}),
        ({"saves_per_epoch": 1}, None),
        ({"save_strategy": "no", "save_total_limit": 3}, None),
        ({"save_strategy": False}, None),
        ({"save_strategy": "epoch", "num_epochs": 4}, {"every_steps": 0.25, "keep": 4}),
        ({"num_epochs": 4}, {"every_steps": 0.25, "keep": 4}),
        ({"num_epochs": 1}, None),
    ],
)
def test_when_checkpoints_are_written(axolotl, loaded, values, checkpoints):
    ledger = run(axolotl, **values)
    assert ledger.recipe.get("checkpoints") == checkpoints
    loaded(ledger)


def test_the_tools_save_by_default(axolotl, llamafactory):
    assert axolotl(num_epochs=3).recipe["checkpoints"] == {"every_steps": 1 / 3, "keep": 4}
    assert llamafactory().recipe["checkpoints"] == {"every_steps": 500, "keep": None}
    assert "checkpoints" not in llamafactory(save_strategy="no").recipe


def test_intervals_in_epochs_need_no_length(axolotl, loaded):
    ledger = axolotl(saves_per_epoch=4, evals_per_epoch=2, val_set_size=0.1, num_epochs=2)
    recipe = loaded(ledger)
    assert (recipe.checkpoints.every_steps, recipe.evaluation.every_steps) == (0.125, 0.25)
    assert not {"not"} & {result(ledger)[key][0] for key in ("saves_per_epoch", "evals_per_epoch")}


@pytest.mark.parametrize(
    ("values", "evaluation"),
    [
        ({"eval_steps": 20}, {}),
        ({"eval_steps": 20, "val_set_size": 0.1}, {"held_out_share": 0.1, "every_steps": 20}),
        ({"eval_strategy": "no", "eval_steps": 20, "val_set_size": 0.1}, {"held_out_share": 0.1}),
        ({"evals_per_epoch": 5, "val_set_size": 0.1}, {"held_out_share": 0.1, "every_steps": 0.2}),
        ({"evals_per_epoch": 1, "val_set_size": 0.1}, {"held_out_share": 0.1}),
    ],
)
def test_when_is_evaluated(axolotl, loaded, values, evaluation):
    ledger = run(axolotl, **values)
    assert ledger.recipe.get("evaluation", {}) == evaluation
    loaded(ledger)


def test_trackers(axolotl, llamafactory, loaded):
    ledger = axolotl(wandb_project="p", use_tensorboard=True, use_mlflow=False, wandb_entity="me")
    assert loaded(ledger).monitoring.trackers == ["tensorboard", "wandb"] and loaded(ledger).monitoring.project == "p"
    assert result(ledger)["wandb_entity"] == ("not", "set it in the environment: WANDB_ENTITY")
    assert "monitoring" not in axolotl(wandb_project="p", wandb_mode="disabled").recipe
    assert "monitoring" not in llamafactory(report_to="none").recipe
    assert llamafactory(report_to=["wandb"], use_swanlab=True).recipe["monitoring"] == {
        "trackers": ["wandb", "swanlab"]
    }


@pytest.mark.parametrize(
    ("values", "name", "folder"),
    [
        ({"output_dir": "./outputs/lora out"}, "lora-out", "outputs"),
        ({"output_dir": "out/"}, "out", "runs"),
        ({"wandb_name": "first"}, "first", None),
        ({}, "config", None),
    ],
)
def test_name_and_place(axolotl, loaded, values, name, folder):
    ledger = axolotl(**values)
    assert (ledger.recipe["name"], ledger.recipe.get("output_dir")) == (name, folder)
    loaded(ledger)
    assert result(axolotl(output_dir="a/b", wandb_name="c"))["wandb_name"][0] == "otherwise"
