"""Shipped recipes train on a fake GPU, at their own width and vocabulary: `train_on_fake_gpu.py` runs their steps."""

from pathlib import Path

import pytest
from fake_cuda import run_program

PROGRAM = Path(__file__).with_name("train_on_fake_gpu.py")
DISTINCT = {"distinct": True, "recipes": [], "steps": 1, "layers": 1}
EVERY = {"distinct": False, "recipes": [], "steps": 1, "layers": 2}

pytestmark = pytest.mark.heavy


@pytest.fixture(
    scope="module",
    params=[DISTINCT, pytest.param(EVERY, marks=pytest.mark.slow)],
    ids=["distinct", "every"],
)
def runs(request):
    """By recipe: what `train_on_fake_gpu.py` printed."""
    *results, _ = run_program(PROGRAM, request.param)
    return {result["recipe"]: result for result in results}


def with_fused_loss(runs):
    return {name: run for name, run in runs.items() if run["setup"].endswith("fused loss")}


def test_every_operation_has_its_tensors_on_one_device(runs):
    assert len(runs) > 15
    assert {name: run["error"] for name, run in runs.items() if "error" in run} == {}


def test_every_trained_parameter_has_a_gradient_in_its_dtype_on_the_gpu(runs):
    assert {name: run["wrong"] for name, run in runs.items() if run["wrong"]} == {}
    assert {
        name: run["without_gradient"] for name, run in runs.items() if run["without_gradient"]
    } == {}


def test_every_weight_is_on_the_gpu(runs):
    assert {name: run["on_cpu"] for name, run in runs.items() if run["on_cpu"]} == {}


def test_a_fused_loss_makes_no_logits_in_fp32(runs):
    in_half = {
        name: run for name, run in with_fused_loss(runs).items() if ", fp32," not in run["setup"]
    }
    assert (
        in_half
        and {
            name: run["fp32_logit_rows"] for name, run in in_half.items() if run["fp32_logit_rows"]
        }
        == {}
    )


def test_losses_and_updates_are_one_kernel_each(runs):
    for name, run in with_fused_loss(runs).items():
        assert run["kernels"].get("cross_entropy_of_row"), name
        assert bool(run["kernels"].get("adamw_kernel")) == (", half," in run["setup"]), name


def test_steps_of_packed_rows_read_no_value_from_the_gpu(runs):
    logging = "trainer.py:_maybe_log_save_evaluate"
    reads = {name: {*run["reads"]} - {logging} for name, run in with_fused_loss(runs).items()}
    assert {name: of_run for name, of_run in reads.items() if of_run} == {}
    assert not any("attention.py:document_bounds" in run["reads"] for run in runs.values())
