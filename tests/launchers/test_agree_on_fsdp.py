import pytest

from cpt.errors import LaunchError
from cpt.launchers.agree_on_fsdp import agree_on_fsdp

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
}


@pytest.fixture
def launched(monkeypatch):
    """Sets what accelerate's launcher leaves in the environment."""
    for name in (*FSDP, "ACCELERATE_USE_DEEPSPEED", "FSDP_ACTIVATION_CHECKPOINTING"):
        monkeypatch.delenv(name, raising=False)

    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def test_the_recipe_alone_is_enough(launched):
    agree_on_fsdp({"fsdp": True})
    agree_on_fsdp({})


def test_both_may_say_the_same(launched):
    launched(**FSDP)
    agree_on_fsdp({"fsdp": True, "fsdp_config": {"reshard_after_forward": True}})
    launched(FSDP_RESHARD_AFTER_FORWARD="SHARD_GRAD_OP", FSDP_OFFLOAD_PARAMS="True")
    agree_on_fsdp({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False, "cpu_offload": "yes"}})


def test_a_launch_with_fsdp_needs_a_recipe_with_it(launched):
    launched(**FSDP)
    with pytest.raises(LaunchError, match="FSDP, which the recipe does not ask for. Write `training: {fsdp: true}`"):
        agree_on_fsdp({})


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("FSDP_VERSION", "1", "version"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "reshard_after_forward"),
        ("FSDP_OFFLOAD_PARAMS", "true", "cpu_offload"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "activation_checkpointing"),
    ],
)
def test_a_launch_that_says_otherwise_is_refused(launched, variable, value, key):
    launched(**{**FSDP, variable: value})
    with pytest.raises(LaunchError, match=f"`training.fsdp_config.{key}`"):
        agree_on_fsdp({"fsdp": True})


def test_deepspeed_beside_it_is_refused(launched):
    launched(ACCELERATE_USE_DEEPSPEED="true")
    with pytest.raises(LaunchError, match="started with DeepSpeed. Keep one"):
        agree_on_fsdp({"fsdp": True})
