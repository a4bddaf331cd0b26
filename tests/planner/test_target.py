import pytest

from cpt.errors import ResourceError
from cpt.hardware import GPU_TYPES
from cpt.planner.target import ASSUMED_HOST_GIB, find_gpu_type, find_target, simplified_gpu


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("A100-80GB", "A100-80GB"),
        ("a100 80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("l40s", "L40S"),
    ],
)
def test_a_gpu_is_known_by_the_names_that_people_and_drivers_give_it(written, meant):
    assert find_gpu_type(written).name == meant


def test_no_two_gpus_share_a_name():
    assert len({simplified_gpu(kind.name) for kind in GPU_TYPES}) == len(GPU_TYPES)


@pytest.mark.parametrize(
    ("written", "meant"), [("RTX 4900", "RTX 4090"), ("A100", "A100-40GB"), ("5090ti", "RTX 5090"), ("H10", "H100")]
)
def test_an_unknown_gpu_gets_a_suggestion_and_the_list(written, meant):
    with pytest.raises(
        ResourceError, match=f"no GPU called `{written}` is known. Did you mean `{meant}`.*Known: RTX 3090.*and cpu"
    ):
        find_gpu_type(written)


def test_the_memory_of_the_host_is_given_or_assumed_and_says_so():
    assert find_target("RTX 4090", 1, 256).host_memory_gib == 256
    assumed = find_target("B200", 2, None)
    assert (assumed.host_memory_gib, assumed.gpus) == (ASSUMED_HOST_GIB, 2) and "--host-memory" in assumed.host_source


def test_the_cpu_is_measured():
    target = find_target("cpu", 1, None)
    assert target.on_cpu and target.peak_flops > 1e8 and "measured" in target.peak_source


def test_each_precision_has_a_peak_of_its_own():
    card = find_target("RTX 4090", 1, 64.0)
    assert (card.peak("half"), card.peak("tf32"), card.peak("fp32")) == (165.2e12, 82.6e12, 82.6e12)
    given = find_target("mine", 1, 64.0, memory=8.0, peak_tflops=50)
    assert given.peak("fp32") == given.peak("half") == 50e12, "one figure was given"
