"""The check of a step under DeepSpeed, whose engine updates in the backward pass."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from threads_as_ranks import on_ranks
from transformers import TrainerState

from cpt.training.step import CheckedStep, GuardedEngine

pytestmark = pytest.mark.heavy  # DeepSpeed takes seconds to import


def zero_optimizer(stage, norms, *, loss_scale):
    """DeepSpeed's optimizer of this stage, with the norms of two groups; None stands for overflowed gradients."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kind = {2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}.get(stage, SimpleNamespace)

    class Optimizer(kind):
        loss_scale = property(lambda self: self.__dict__["scale"])

        def scaled_global_norm(self):
            return torch.linalg.vector_norm(torch.stack(self.norms))

        def _get_norm_groups(self):
            return self.norms

    optimizer = Optimizer.__new__(Optimizer)
    vars(optimizer).update(
        norms=norms,
        scale=loss_scale,
        overflow=False,
        check_grad_overflow=False,
        external_loss_scale=None,
    )
    return optimizer


class Engine:
    """The part of DeepSpeed's engine that a step uses; an update is skipped where a norm is infinite."""

    def __init__(self, optimizer, stage):
        self.optimizer, self.stage = optimizer, stage
        self.losses, self.boundaries, self.steps = [], [], []

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.boundaries.append(is_boundary)

    def backward(self, loss, **options):
        self.losses.append((loss, options))

    def step(self):
        optimizer = self.optimizer
        if optimizer.norms is None:  # DeepSpeed has seen an overflow: it asks for no norm
            optimizer.overflow = True
            self.steps.append("overflow")
            return
        norms = (
            optimizer._get_norm_groups() if self.stage == 3 else [optimizer.scaled_global_norm()]
        )
        self.steps.append([float(norm) for norm in norms])
        optimizer.overflow = any(math.isinf(norm) for norm in norms)


def steps_of(rank, stage, *, losses, norms, scales_loss=False, loss_scale=1.0, limit=100.0):
    """Train steps whose micro-batches have these losses; return what was checked and what followed."""
    checked = []

    def check(metrics):
        checked.append([round(value, 4) for value in metrics.tolist()])
        return ~metrics.isfinite().all() | (metrics > limit).any()

    optimizer = zero_optimizer(stage, None, loss_scale=loss_scale)
    guarded = GuardedEngine(Engine(optimizer, stage), check, scales_loss=scales_loss)
    overflows = []
    for micro_batches, of_groups in zip(losses, norms, strict=True):
        optimizer.norms = of_groups and [torch.tensor(float(norm)) for norm in of_groups]
        for number, loss in enumerate(micro_batches, start=1):
            last = {} if number == len(micro_batches) else {"sync_gradients": False}
            guarded.backward(torch.tensor(loss + rank), scale=2, **last)
        overflows.append(optimizer.overflow)
    return guarded, checked, overflows


INF = math.inf


@pytest.mark.parametrize("stage", [2, 3])
def test_each_step_is_checked_once_by_its_mean_loss_and_its_unscaled_norm(stage):
    def train(rank):
        return steps_of(
            rank,
            stage,
            losses=[[1.0, 2.0, 3.0], [5.0], [500.0], [0.5, 0.25]],
            norms=[(3, 4), (6, 8), (9, 12), (30, 40)],
            loss_scale=0.5,
        )

    for guarded, checked, overflows in on_ranks(3, train):
        # 6 and 3 times the rank; the mean over ranks of the sum over micro-batches
        assert checked == [[9.0, 10.0], [6.0, 20.0], [501.0, 30.0], [2.75, 100.0]]
        assert overflows == [False] * 4, "the schedule advances"
        engine = guarded.engine
        assert engine.boundaries == [False, False, True, True, True, False, True]
        assert [options for _, options in engine.losses] == [{"scale": 2}] * 7
        whole = {2: [[5.0], [10.0], [INF], [50.0]], 3: [[3, 4], [6, 8], [INF, INF], [30, 40]]}
        assert engine.steps == whole[stage]
        if stage == 2:
            assert engine.optimizer.check_grad_overflow is True


@pytest.mark.parametrize("scales_loss", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_whose_gradients_overflowed_is_checked_with_an_infinite_norm(stage, scales_loss):
    (found,) = on_ranks(
        1,
        lambda rank: steps_of(
            rank,
            stage,
            losses=[[7.0], [1.0], [2.0, 3.0], [4.0]],
            norms=[None, (3, 4), None, (300, 400)],
            scales_loss=scales_loss,
        ),
    )
    guarded, checked, overflows = found
    assert checked == [[7.0, INF], [1.0, 5.0], [5.0, INF], [4.0, 500.0]]
    waits = scales_loss  # fp16's schedule
    assert overflows == [waits, False, waits, waits]
    assert [step == "overflow" for step in guarded.engine.steps] == [True, False, True, False]


def test_a_negative_norm_of_a_group_of_zero3_is_one_that_is_not_finite():
    ((_, checked, _),) = on_ranks(
        1, lambda rank: steps_of(rank, 3, losses=[[1.0], [1.0]], norms=[(0, 4), (-1, 4)])
    )
    assert checked == [[1.0, 4.0], [1.0, INF]]


def test_an_optimizer_that_cannot_skip_is_reported_and_left_alone(caplog):
    ((guarded, checked, overflows),) = on_ranks(
        1, lambda rank: steps_of(rank, 0, losses=[[1.0], [2.0]], norms=[(3, 4), None])
    )
    assert checked == [] and overflows == [False, True] and not guarded.knows_norms
    assert guarded.engine.steps == [[5.0], "overflow"]
    (warning,) = caplog.messages
    assert warning.startswith("safety.loss_guard: DeepSpeed's Optimizer")


class Detector:
    """Skips what is not finite, and losses above 500."""

    def __init__(self):
        self.checked = []

    def check(self, step, metrics):
        self.checked.append((step, metrics.tolist()))
        return ~metrics.isfinite().all() | (metrics[0] > 500)


def checked_step(*, detector, fp16=False):
    """The check of a run under ZeRO-2, at its seventh step."""
    wrapped = DeepSpeedEngineWrapper(Engine(zero_optimizer(2, None, loss_scale=1.0), 2))
    accelerator = SimpleNamespace(clip_grad_norm_=None, deepspeed_engine_wrapped=wrapped)
    weights = torch.nn.Linear(3, 5)
    weights.bias.requires_grad_(False)
    trainer = SimpleNamespace(
        accelerator=accelerator,
        model=weights,
        is_deepspeed_enabled=True,
        state=TrainerState(global_step=6),
        args=SimpleNamespace(fp16=fp16, world_size=3),
        _tr_loss=torch.tensor(0.5),
    )
    begun = []
    guard = SimpleNamespace(detector=detector, skipped_since_log=["old"], begin_step=begun.append)
    step = CheckedStep(
        trainer,
        guard,
        SimpleNamespace(reshard=lambda: None),
        metrics_to_check=lambda metrics: metrics * 2,
        finish=None,
        releases_gradients=False,
    )
    return step, trainer, begun


@pytest.mark.parametrize("fp16", [True, False])
def test_the_engine_of_a_guarded_run_is_wrapped_once(fp16):
    detector = Detector()
    step, trainer, begun = checked_step(detector=detector, fp16=fp16)
    engine = trainer.accelerator.deepspeed_engine_wrapped.engine
    step.on_train_begin(trainer.args, trainer.state, None)
    guarded = trainer.accelerator.deepspeed_engine_wrapped
    assert isinstance(guarded, GuardedEngine) and guarded.engine is engine
    assert guarded.scales_loss is fp16 and step.trained == [trainer.model.weight]
    assert step.guard.skipped_since_log == [] and step.last_logged_step == 6
    step.on_train_begin(trainer.args, trainer.state, None)
    assert trainer.accelerator.deepspeed_engine_wrapped is guarded
    step.begin()
    assert guarded.check(torch.tensor([3.0, 5.0])).tolist() is False
    assert (begun, detector.checked) == ([7], [(7, [6.0, 10.0])])


def test_an_engine_without_a_guard_stays_as_it_is():
    step, trainer, _ = checked_step(detector=None)
    wrapped = trainer.accelerator.deepspeed_engine_wrapped
    step.on_train_begin(trainer.args, trainer.state, None)
    assert trainer.accelerator.deepspeed_engine_wrapped is wrapped
    step.last_logged_step = 5
    step.begin()
    trainer._tr_loss += 3
    step.on_pre_optimizer_step(trainer.args, trainer.state, None)
    assert step.is_updating and step.loss.item() == 3.5, "nothing is checked"


@pytest.mark.parametrize(
    ("metrics", "fp16", "counted"),
    [
        ((3.0, 5.0), False, 3.5),
        ((math.nan, 5.0), False, 0.5),
        ((3.0, INF), False, 0.5),
        ((3.0, INF), True, 3.5),  # the scaler repeats it
        ((math.nan, INF), True, 0.5),
        ((300.0, 5.0), True, 0.5),
    ],
)
def test_the_loss_of_a_skipped_step_does_not_count(metrics, fp16, counted):
    step, trainer, _ = checked_step(detector=Detector(), fp16=fp16)
    step.on_train_begin(trainer.args, trainer.state, None)
    step.last_logged_step = 5
    step.begin()
    trainer._tr_loss += 3
    skip = step.check_metrics(torch.tensor(metrics))
    assert skip.item() is (metrics != (3.0, 5.0))
    step.on_pre_optimizer_step(trainer.args, trainer.state, None)
    assert step.is_updating and step.loss.item() == counted


def test_the_parameters_of_a_step_are_those_after_fsdp_has_sharded_them_again():
    """Gathered ones get no gradients: the norm would lack those of a tied head, which FSDP2 keeps gathered."""
    step, trainer, _ = checked_step(detector=None)
    sharded = torch.nn.Linear(2, 2)
    step.engine = SimpleNamespace(reshard=lambda: setattr(trainer, "model", sharded))
    step.on_train_begin(trainer.args, trainer.state, None)
    assert step.trained == list(sharded.parameters())


# --- without an engine -----------------------------------------------------------------------------------------------


def plain_step(rank, processes, *, norm=8.0, scaler=None, max_norm=1.0):
    """The check of a run of several processes, each with gradients whose norm is the same, in its seventh step."""
    weights = torch.nn.Linear(4, 1, bias=False)
    weights.weight.grad = torch.full((1, 4), norm / 2)
    accelerator = SimpleNamespace(
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_, scaler=scaler, sync_gradients=True
    )
    trainer = SimpleNamespace(
        accelerator=accelerator,
        model=weights,
        model_wrapped=weights,
        optimizer=SimpleNamespace(optimizer=torch.optim.SGD(weights.parameters())),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
        state=TrainerState(global_step=6),
        args=SimpleNamespace(
            fp16=scaler is not None,
            world_size=processes,
            max_grad_norm=max_norm,
            device=torch.device("cpu"),
        ),
        _tr_loss=torch.tensor(0.5),
    )
    detector = Detector()
    guard = SimpleNamespace(detector=detector, skipped_since_log=[], begin_step=lambda step: None)
    step = CheckedStep(
        trainer,
        guard,
        SimpleNamespace(reshard=lambda: None),
        metrics_to_check=lambda metrics: metrics,
        finish=None,
        releases_gradients=False,
    )
    step.on_train_begin(trainer.args, trainer.state, None)
    step.last_logged_step = 5
    step.begin()
    return step, trainer


@pytest.mark.parametrize(
    ("losses", "mean", "is_skipped"),
    [
        ((3.0, 4.0, 8.0), 5.0, False),
        ((3.0, 4.0, 2000.0), 669.0, True),
        ((3.0, INF, 1.0), INF, True),
    ],
)
def test_all_processes_check_the_mean_of_their_losses_and_skip_alike(losses, mean, is_skipped):
    def check(rank):
        step, trainer = plain_step(rank, 3)
        trainer._tr_loss += losses[rank]
        norm = trainer.accelerator.clip_grad_norm_(None, 1.0)
        step.on_pre_optimizer_step(trainer.args, trainer.state, None)
        is_updated = trainer.accelerator.sync_gradients
        clipped = trainer.model.weight.grad.norm()
        return step.guard.detector.checked, is_updated, step.loss.item(), float(norm), clipped

    for rank, (checked, is_updated, counted, norm, clipped) in enumerate(on_ranks(3, check)):
        assert checked == [(7, [mean, 8.0])] and is_updated is not is_skipped
        assert counted == (0.5 if is_skipped else 0.5 + losses[rank])
        assert norm == 8.0 and clipped == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("loss", "norm", "has_scaler", "is_updated"),
    [
        (3.0, INF, True, True),  # the scaler skips it, and lowers its scale
        (INF, INF, True, False),
        (3.0, INF, False, False),
        (3.0, 8.0, True, True),
        (600.0, 8.0, True, False),
    ],
)
def test_a_loss_scale_that_is_too_large_is_left_to_the_scaler(loss, norm, has_scaler, is_updated):
    step, trainer = plain_step(0, 1, norm=norm, scaler=object() if has_scaler else None)
    trainer._tr_loss += loss
    step.norm_of_step()
    step.on_pre_optimizer_step(trainer.args, trainer.state, None)
    assert trainer.accelerator.sync_gradients is is_updated
    (checked,) = step.guard.detector.checked
    assert checked == (7, [loss, norm])


@pytest.mark.parametrize(("max_norm", "clipped"), [(2.0, 2.0), (0.0, 8.0), (100.0, 8.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_to_a_positive_norm_and_else_only_measured(max_norm, clipped, dtype):
    step, trainer = plain_step(0, 1, max_norm=max_norm)
    trainer.model.to(dtype)
    trainer.model.weight.grad = torch.full((1, 4), 4.0, dtype=dtype)
    assert float(step.measure_norm()) == 8.0
    assert float(trainer.model.weight.grad.float().norm()) == pytest.approx(clipped, rel=1e-2)


def test_the_logged_mean_is_that_of_accepted_steps():
    step, trainer = plain_step(0, 1)
    skipped = [SimpleNamespace(loss=7.0), SimpleNamespace(loss=9.0)]
    for now, spikes, logged, expected in (
        (8, 1, {"loss": 2.0}, {"loss": 3.0, "skipped_steps": 1}),
        (10, 2, {"loss": 0.0}, {"loss": 9.0, "skipped_steps": 2}),
        (12, 0, {"loss": 2.0}, {"loss": 2.0}),
        (15, 2, {"loss": 2.0}, {"loss": 6.0, "skipped_steps": 2}),
        (15, 2, {"eval_loss": 2.0}, {"eval_loss": 2.0}),
    ):
        trainer.state.global_step = now
        step.guard.skipped_since_log = skipped[:spikes]
        step.correct_loss(logged)
        assert logged == expected
    assert step.last_logged_step == 15


@pytest.mark.parametrize("is_guarded", [True, False])
def test_released_gradients_are_checked_by_the_loss_of_the_step_before_they_exist(is_guarded):
    step, trainer = plain_step(0, 1)
    begun = []
    released = []
    passed = []
    step.guard.begin_step = begun.append
    step.released = SimpleNamespace(begin=released.append)
    step.backward_pass = lambda loss, **options: passed.append((loss, options))

    class Decides:
        def decide(self, metrics):
            decided.append(metrics.tolist())
            return metrics[0] > 500, metrics > 500

    decided = []
    step.guard.detector = Decides() if is_guarded else None
    loss = torch.tensor(600.0, dtype=torch.bfloat16)
    step.update_in_backward(loss, scale=2)
    assert step.is_updating and passed == [(loss, {"scale": 2})]
    if is_guarded:
        assert (begun, decided, released) == ([7], [[600.0, 0.0]], [torch.tensor(True)])
        assert step.loss_of_step.dtype == torch.float32
    else:
        assert (begun, released) == ([], [None])
