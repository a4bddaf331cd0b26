import pytest

from cpt.init.choices import method_that_fits
from cpt.init.memory import fit, ways_to_train, with_micro_batch
from cpt.planner.target import find_target


def chosen(base, gpu, gpus=1, host=64.0, full=None):
    found, refused = method_that_fits(base, find_target(gpu, gpus, host), 4096, full)
    return found, refused


def test_a_small_model_is_trained_whole_on_one_card(base_of):
    found, refused = chosen(base_of("0.5b"), "RTX 4090")
    assert (found.method.name, found.method.profile, refused) == ("full", None, []) and found.micro_batch >= 2


@pytest.mark.slow
def test_1_5b_on_24_gb_keeps_its_optimizer_on_the_host(base_of):
    found, refused = chosen(base_of("1.5b"), "RTX 4090")
    assert (found.method.name, found.method.profile) == ("full", "ds_config_prototype.json") and len(refused) == 1


@pytest.mark.long
def test_8b_on_24_gb_depends_on_the_memory_of_the_host(base_of):
    base = base_of("8b")
    assert chosen(base, "RTX 4090", host=192)[0].method.profile == "ds_config_8b_24gb.json"
    found, refused = chosen(base, "RTX 4090", host=64)
    assert (
        found.method.name == "adapters" and found.micro_batch == 1 and found.setup.fused_loss and found.checkpointing
    )
    assert any("needs 139 GiB of host memory, there is 64" in line for line in refused)


@pytest.mark.long
def test_8b_on_80_gb_gets_adapters_with_embeddings_and_on_four_such_cards_all_parameters(base_of):
    base = base_of("8b")
    assert chosen(base, "H100")[0].method.name == "lora"
    assert chosen(base, "A100-80GB", gpus=4, host=512)[0].method.profile == "ds_config_zero1.json"
    assert chosen(base, "A100-40GB", gpus=8, host=512)[0].method.profile == "ds_config_production.json"


@pytest.mark.slow
def test_what_the_user_wants_is_taken_where_it_fits(base_of):
    assert chosen(base_of("0.5b"), "RTX 4090", full=False)[0].method.name == "lora"


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["RTX 4090", pytest.param("H100", marks=pytest.mark.slow)])
def test_a_micro_batch_is_the_largest_that_fits(base_of, gpu):
    base, target = base_of("1.5b"), find_target(gpu, 1, 64.0)
    for method in ways_to_train(base, target, 4096):
        if (found := fit(method, base, target, 4096)) is None or found.micro_batch * 4096 >= 32_768:
            continue
        assert (
            found.memory_gib <= target.memory_gib < with_micro_batch(found, 2 * found.micro_batch).memory_gib * 1.09
        )  # what a proposal leaves free


def test_hours_go_with_the_tokens(base_of):
    base, target = base_of("0.5b"), find_target("H100", 1, 64.0)
    found, _ = chosen(base, "H100")
    assert found.hours(target, 2_000_000, 0.35) == pytest.approx(2 * found.hours(target, 1_000_000, 0.35))
