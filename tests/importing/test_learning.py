import pytest
from imported_configs import result

from cpt.errors import RecipeError
from cpt.importing.learning import AS_THEY_ARE, NEAREST, SCHEDULES
from cpt.optim.build import OPTIMIZERS, check_optimizer
from cpt.optim.schedules import SCHEDULES as OURS
from cpt.recipe.schema import Optimizer


def test_what_stands_for_a_name_there_exists_here(axolotl):
    for name in {*AS_THEY_ARE, *NEAREST}:
        check_optimizer(
            Optimizer.model_validate(axolotl(optimizer=name, adam_beta2=0.95, adam_epsilon=1e-6).recipe["optimizer"])
        )
    assert {*NEAREST.values()} <= OPTIMIZERS.keys() and {*SCHEDULES.values()} <= OURS.keys()


def test_defaults_there_are_said_where_they_are_others_here(axolotl):
    assert axolotl().recipe["optimizer"] == {
        "name": "adamw",
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "betas": [0.9, 0.999],
    }


def test_numbers_of_the_optimizer(axolotl):
    ledger = axolotl(learning_rate="2e-4", weight_decay=0.01, adam_beta1=0.8, adam_epsilon=1e-6)
    assert ledger.recipe["optimizer"] == {
        "name": "adamw",
        "learning_rate": 2e-4,
        "weight_decay": 0.01,
        "betas": [0.8, 0.999],
        "eps": 1e-6,
    }
    assert result(axolotl(optimizer="sgd", adam_beta1=0.8))["adam_beta1"] == ("not", "sgd takes no such option")


def test_optimizers_that_there_are_not(axolotl, llamafactory):
    ledger = axolotl(optimizer="lion_8bit")
    assert (
        ledger.recipe["optimizer"]["name"] == "adamw"
        and "there is no lion_8bit here" in result(ledger)["optimizer"][1]
    )
    assert result(axolotl(optimizer="ao_adamw_4bit"))["optimizer"][0] == "otherwise"
    assert llamafactory(use_muon=True).recipe["optimizer"]["name"] == "muon"


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        ({}, {"name": "cosine", "floor": 0.0, "warmup_tokens": 1536}),
        ({"lr_scheduler": "linear", "warmup_steps": 5}, {"name": "linear", "floor": 0.0, "warmup_tokens": 2560}),
        ({"lr_scheduler": "constant_with_warmup", "warmup_ratio": 0.1}, {"name": "constant", "warmup_share": 0.1}),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, {"name": "constant"}),
        ({"cosine_min_lr_ratio": 0.2, "warmup_steps": 0}, {"name": "cosine", "floor": 0.2}),
        (
            {
                "lr_scheduler": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 5e-6},
                "warmup_steps": 0,
                "learning_rate": 5e-5,
            },
            {"name": "cosine", "floor": 0.1},
        ),
        (
            {
                "lr_scheduler": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 20},
                "warmup_steps": 1000,
            },
            {"name": "wsd", "decay_tokens": 10240, "floor": 0.0, "warmup_tokens": 51200},
        ),
    ],
)
def test_schedules_in_tokens(axolotl, values, schedule):
    ledger = axolotl(max_steps=100, sequence_len=512, **values)
    assert {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in schedule.items()
    } == ledger.recipe["schedule"]


def test_schedules_that_there_are_not(axolotl):
    ledger = axolotl(lr_scheduler="rex", lr_scheduler_kwargs={"max_val": 1})
    assert ledger.recipe["schedule"]["name"] == "cosine" and result(ledger)["lr_scheduler"][0] == "not"
    assert "max_val" in result(ledger)["lr_scheduler_kwargs"][1]
    assert result(axolotl(lr_scheduler="warmup_stable_decay"))["lr_scheduler"][0] == "not", (
        "without the length of its decay"
    )


@pytest.mark.parametrize("options", [{"min_lr": "x"}, {"min_lr_rate": [1]}, "x"])
def test_options_of_a_schedule_that_are_none_are_told(axolotl, options):
    with pytest.raises(RecipeError, match="`lr_scheduler_kwargs`: expected"):
        axolotl(lr_scheduler="cosine_with_min_lr", lr_scheduler_kwargs=options, learning_rate=1e-4)


def test_a_warmup_of_a_run_whose_length_nobody_knows_is_a_share(axolotl, loaded):
    ledger = axolotl(warmup_ratio=0.1)
    assert loaded(ledger).schedule.options["warmup_share"] == 0.1 and result(ledger)["warmup_ratio"] == (
        "carried",
        "schedule.warmup_share",
    )
    assert axolotl(warmup_steps=0.2).recipe["schedule"]["warmup_share"] == 0.2, "as transformers 5 writes it"
    assert (
        axolotl().recipe["schedule"]["warmup_share"] == 0.03
        and "at most 100 steps" in axolotl().comments["schedule.warmup_share"]
    )
