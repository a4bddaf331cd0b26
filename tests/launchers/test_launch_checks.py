import pytest
from tiny_launch import launch_of

from cpt.errors import LaunchError
from cpt.launchers.launch_checks import refuse_contradictions

ZERO = "training.deepspeed={zero_optimization: {stage: 2}}"


def test_a_sound_launch_passes(tmp_path):
    for engine in ("accelerate", "torchrun", "slurm"):
        refuse_contradictions(launch_of(tmp_path, nodes=2, engine=engine))
    refuse_contradictions(launch_of(tmp_path, nodes=2, engine="deepspeed", overrides=(ZERO,)))


def test_deepspeeds_launcher_without_a_profile_would_split_nothing(tmp_path):
    with pytest.raises(LaunchError, match="names no DeepSpeed profile.*Add `training.deepspeed=deepspeed_configs"):
        refuse_contradictions(launch_of(tmp_path, engine="deepspeed"))


def test_deepspeeds_launcher_is_not_for_fsdp(tmp_path):
    with pytest.raises(LaunchError, match="FSDP.*--launcher torchrun"):
        refuse_contradictions(launch_of(tmp_path, engine="deepspeed", overrides=("training.fsdp=full_shard",)))


@pytest.mark.parametrize(("profile", "recipe"), [("true", ()), ("false", ("training.bf16=true",))])
def test_a_profile_of_another_precision_is_refused(tmp_path, profile, recipe):
    overrides = (f"training.deepspeed={{bf16: {{enabled: {profile}}}}}", *recipe)
    with pytest.raises(LaunchError, match=f"profile says `bf16.enabled: {profile}`, the recipe"):
        refuse_contradictions(launch_of(tmp_path, overrides=overrides))


def test_a_profile_that_leaves_the_precision_to_the_recipe_passes(tmp_path):
    for overrides in (
        ("training.deepspeed={bf16: {enabled: auto}}", "training.bf16=true"),
        (ZERO, "training.bf16=true"),
    ):
        refuse_contradictions(launch_of(tmp_path, overrides=overrides))


def test_a_global_batch_that_does_not_divide_says_which_nodes_would_fit(tmp_path):
    with pytest.raises(
        LaunchError, match=r"is 4,096, which .* 3 node\(s\) x 2 GPUs x .* = 768 tokens.*nodes: 1, 2, 4 would fit\."
    ):
        refuse_contradictions(launch_of(tmp_path, nodes=3))


def test_a_batch_that_is_smaller_than_all_processes_take_at_once_is_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"= 8,192 tokens"):
        refuse_contradictions(launch_of(tmp_path, nodes=32))


def test_a_micro_batch_that_the_planner_chooses_is_not_judged(tmp_path):
    refuse_contradictions(launch_of(tmp_path, nodes=3, overrides=("training.per_device_train_batch_size=auto",)))


def test_processes_that_share_rows_read_them_once(tmp_path):
    together = ("training.parallelism_config={sp_size: 2}", "budget.global_batch_tokens=256")
    refuse_contradictions(launch_of(tmp_path, nodes=2, overrides=together))
    with pytest.raises(LaunchError, match="which does not divide"):
        refuse_contradictions(launch_of(tmp_path, nodes=2, overrides=together[1:]))


def test_groups_of_processes_must_be_whole(tmp_path):
    with pytest.raises(LaunchError, match="puts 4 processes together.* = 2 processes"):
        refuse_contradictions(launch_of(tmp_path, overrides=("training.parallelism_config={sp_size: 4}",)))
