import math

import pytest
import torch

from cpt.data.rows.mixture import RowsOfSteps
from cpt.errors import RecipeError
from cpt.recipe.schema import Component, Recipe
from cpt.recipe.schema import LossGuard as Section
from cpt.training.guards import StepGuard
from cpt.training.loss_guard import (
    FEWEST,
    SIGMA_OF_MAD,
    STEPS_BEHIND,
    YOUTH,
    SkipBudget,
    SpikeDetector,
    StepVerdict,
    check_loss_guard,
    robust,
)

CPU = torch.device("cpu")


def guard(**options):
    return SpikeDetector(Section(**options), CPU)


def verdicts(guard, losses, norms=None):
    """Whether each step is skipped."""
    found = []
    for step, loss in enumerate(losses, start=1):
        skip = guard.check(step, torch.tensor([loss, norms[step - 1] if norms else 1.0]))
        (verdict,) = guard.read()
        assert bool(skip) is verdict.is_skipped, "the optimizer and the host decide alike"
        found.append(verdict.is_skipped)
    return found


def healthy(num_steps, *, seed=0, noise=0.03, norm_noise=0.3):
    """A loss that falls fast and then slowly, and a gradient norm that falls and jumps about."""
    draw = torch.Generator().manual_seed(seed)
    step = torch.arange(num_steps)
    losses = 2 + 9 * torch.exp(-step / 30) + 1.5 * torch.exp(-step / 800)
    losses = losses * (1 + noise * torch.randn(num_steps, generator=draw))
    norms = (0.4 + 5 * torch.exp(-step / 60)) * torch.exp(
        norm_noise * torch.randn(num_steps, generator=draw)
    )
    return losses.tolist(), norms.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_skipped_from_the_first_step_on(bad):
    assert verdicts(guard(), [bad, 5.0, bad, 5.0]) == [True, False, True, False]
    assert verdicts(guard(), [5.0, 5.0, 5.0], [bad, 1.0, bad]) == [True, False, True]


def test_a_spike_in_the_first_steps_is_skipped_and_a_loss_that_doubles_is_none():
    assert verdicts(guard(), [5.0, 1e6, 5.0, 10.0, 1e6, 5.0]) == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]


def test_the_first_step_is_skipped_where_its_loss_is_above_what_a_language_model_can_have():
    assert verdicts(SpikeDetector(Section(), CPU, 100.0), [1e6, 101.0, 99.0, 12.0]) == [
        True,
        True,
        False,
        False,
    ]
    assert verdicts(SpikeDetector(Section(), CPU), [1e6, 5.0]) == [False, False]


def robust_by_hand(value, accepted, sigmas):
    """In float64; the median of an even number is the upper one."""
    if not accepted:
        return False
    median = sorted(accepted)[len(accepted) // 2]
    deviation = sorted(abs(one - median) for one in accepted)[len(accepted) // 2]
    limit = sigmas * (1 + YOUTH / (1 if len(accepted) < FEWEST else len(accepted)))
    return value - median > limit * max(1, SIGMA_OF_MAD * deviation)


@pytest.mark.parametrize("count", [0, 1, 2, FEWEST - 1, FEWEST, FEWEST + 1, 40])
def test_a_spike_is_what_the_formula_says(count):
    draw = torch.Generator().manual_seed(count)
    accepted = 9 * torch.rand(2, count, generator=draw)
    history = torch.full((2, 50), math.inf)
    history[:, torch.randperm(50, generator=draw)[:count]] = accepted
    seen = set()
    for sigmas in (1.5, 6.0):
        for value in torch.linspace(0, 3000, 900):
            step = torch.stack((value, value / 3))
            found = robust(step, history, torch.tensor(count), sigmas=sigmas).tolist()
            rows = zip(step.tolist(), accepted.tolist(), strict=True)
            assert found == [robust_by_hand(one, row, sigmas) for one, row in rows]
            seen |= {*found}
    assert seen == ({False, True} if count else {False})


def test_a_verdict_names_the_figure_that_was_a_spike():
    watcher = guard()
    steps = [(2.0, 1.0)] * 20 + [(2e5, 1.0), (2.0, 1e6), (math.nan, 1.0), (2.0, math.inf)]
    for step, figures in enumerate(steps, start=1):
        watcher.check(step, torch.tensor(figures))
        (verdict,) = watcher.read()
    found = [
        StepVerdict(7, *figures) for figures in ((2.0, 9.0, True, False), (2.0, 9.0, False, True))
    ]
    assert [one.complaint() for one in found] == [
        "its loss was far too high (loss 2, gradient norm 9)",
        "its gradient norm was far too high (loss 2, gradient norm 9)",
    ]
    assert (verdict.step, verdict.loss, verdict.gradient_norm) == (24, 2.0, math.inf)
    assert verdict.complaint() == "its gradient was not finite (loss 2)"
    assert StepVerdict(7, math.nan, 1.0, False, False).complaint() == "its loss was nan"
    watcher = guard()
    flags = []
    for step, figures in enumerate(steps[:22], start=1):
        watcher.check(step, torch.tensor(figures))
        flags += [(one.has_loss_spike, one.has_gradient_spike) for one in watcher.read()]
    assert flags == [(False, False)] * 20 + [(True, False), (False, True)]


def test_a_norm_that_is_known_later_replaces_that_of_its_step_unless_it_was_skipped():
    late, known = guard(window=FEWEST), guard(window=FEWEST)
    for step in range(1, FEWEST + 4):
        late.check(step, torch.tensor([2.0, 0.0]))
        late.learn_norm(torch.tensor(float(step)), skipped=torch.tensor(False))
        known.check(step, torch.tensor([2.0, float(step)]))
        assert late.state() == known.state()
    late.learn_norm(torch.tensor(1e9), skipped=torch.tensor(True))
    assert late.state() == known.state()


def test_a_guard_without_options_is_the_documented_one():
    plain, given = guard(), guard(window=128, skips=4, rollbacks=3, sigmas=6.0)
    for one in (plain, given):
        assert (one.window, one.skips, one.rollbacks) == (128, 4, 3)
    losses = [2.0 + 0.02 * (step % 5) for step in range(60)]
    values = [loss * factor for loss in losses for factor in (1.0, 1.6, 1.65, 1.7)]
    found = verdicts(plain, losses + values)
    assert found == verdicts(given, losses + values) and True in found
    assert found != verdicts(guard(sigmas=7.0), losses + values)


def test_a_window_of_another_size_starts_empty():
    first, other = guard(window=64), guard(window=32)
    verdicts(first, [2.0] * 5)
    verdicts(other, [3.0] * 5)
    other.restore(first.state())
    assert other.state() == guard(window=32).state()


@pytest.mark.parametrize("spikes", ["loss", "norm"])
@pytest.mark.parametrize("after", [6, 20, 300])
def test_a_spike_is_skipped_and_not_remembered(after, spikes):
    losses, norms = healthy(after + 3)
    figures = losses if spikes == "loss" else norms
    figures[after] *= 1e4
    assert verdicts(guard(), losses, norms) == [False] * after + [True, False, False]


def test_a_loss_of_twice_the_last_ones_is_a_spike_and_one_of_five_fourths_is_none():
    losses = [3.0 + 0.01 * (step % 7) for step in range(200)]
    assert verdicts(guard(), [*losses, 6.0, 3.75, 3.0])[-3:] == [True, False, False]


def test_healthy_runs_raise_no_false_alarm():
    skipped = 0
    for seed in range(3):
        figures = healthy(400, seed=seed, noise=0.04 * (seed + 1), norm_noise=0.4 * (seed + 1))
        skipped += sum(verdicts(guard(), *figures))
    assert skipped <= 1, f"{skipped} of 1,200 steps"


def test_a_slow_rise_as_after_a_rewarming_is_no_spike():
    losses = [2.0] * 200 + [2.0 + 0.5 * step / 100 for step in range(100)] + [2.5] * 100
    assert not any(verdicts(guard(), losses))


def test_a_resumed_guard_decides_as_the_one_that_was_not_interrupted():
    losses, norms = healthy(200)
    losses[150] *= 30
    straight = guard(window=64)
    expected = verdicts(straight, losses, norms)
    first, second = guard(window=64), guard(window=64)
    before = verdicts(first, losses[:130], norms[:130])
    second.restore(first.state())
    assert before + verdicts(second, losses[130:], norms[130:]) == expected and expected[150]
    assert second.state() == straight.state()


def test_a_new_level_is_a_spike_unless_the_guard_forgets_the_old_one():
    remembers, forgets = guard(), guard()
    assert any(verdicts(remembers, [1.0] * 50 + [4.0] * 10))
    before = verdicts(forgets, [1.0] * 50)
    forgets.forget()
    assert not any(before + verdicts(forgets, [4.0] * 10))


def test_the_host_reads_in_order_and_may_stay_behind():
    watcher = guard()
    for step in range(1, 7):
        watcher.check(step, torch.tensor([float(step), 1.0]))
        read = [(verdict.step, verdict.loss) for verdict in watcher.read(unread=STEPS_BEHIND)]
        assert read == ([(step - STEPS_BEHIND, step - STEPS_BEHIND)] if step > STEPS_BEHIND else [])
    assert [verdict.step for verdict in watcher.read()] == [5, 6]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"sigma": 5}, "sigmas"),
        ({"window": FEWEST - 1}, "window"),
        ({"skips": -1}, "skips"),
        ({"rollbacks": -1}, "rollbacks"),
        ({"skips": "many"}, "skips"),
        ({"name": "robast"}, "robust"),
    ],
)
def test_a_wrong_option_is_refused(wrong, named):
    check_loss_guard(None)
    check_loss_guard(Section(window=FEWEST, sigmas=5, skips=0, rollbacks=0))
    with pytest.raises(RecipeError, match=named):
        check_loss_guard(Component(**{"name": "robust", **wrong}))


# --- the budget of skipped steps ---


def note(budget, *steps, bad=()):
    for step in steps:
        budget.note(StepVerdict(step, math.nan if step in bad else 2.0, 1.0, False, False))


@pytest.fixture
def budget():
    """Two skips in ten steps of four rows."""
    return SkipBudget(RowsOfSteps(4), 10, 2)


def test_more_skips_than_allowed_within_the_window_exhaust_it(budget):
    note(budget, *range(1, 8), bad=(3, 5))
    assert not budget.is_exhausted
    note(budget, 8, bad=(8,))
    assert budget.is_exhausted and budget.total == 3


def test_a_skip_counts_no_more_once_it_is_older_than_the_window(budget):
    note(budget, *range(1, 15), bad=(2, 3, 13))
    assert not budget.is_exhausted and budget.total == 3
    note(budget, 14, bad=(14,))
    assert [skipped.step for skipped in budget.recent] == [13, 14]
    note(budget, 23, 24, bad=(23, 24))  # 13 is ten steps before 23
    assert [skipped.step for skipped in budget.recent] == [23, 24] and budget.total == 6
    resumed = SkipBudget(RowsOfSteps(4), 10, 2)
    resumed.restore(budget.state())
    assert resumed == budget


def test_a_roll_back_names_the_skipped_steps_with_their_rows(budget):
    note(budget, *range(1, 6), bad=(2, 3, 5))
    bad = budget.roll_back()
    assert (
        [skipped.step for skipped in bad] == [2, 3, 5]
        and budget.rollbacks == 1
        and not budget.recent
    )
    assert [skipped.rows for skipped in bad] == [(4, 8), (8, 12), (16, 20)]


# --- what follows a step ---------------------------------------------------------------------------------------------


def step_guard(folder, *, fp16=False, phases=(), **safety):
    """The guard of a run with steps of 256 tokens in four rows; its loss guard forgives one skipped step of eight."""
    until = [{"until": tokens, "weights": {"a": 1.0}} for tokens in phases]
    recipe = Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "some/model"},
            "data": {
                "sequence_length": 64,
                "sources": [{"path": "a.txt", "name": "a"}],
                "phases": [*until, {"weights": {"a": 1.0}}] if until else [],
            },
            "budget": {"tokens": 2560, "global_batch_tokens": 256},
            "safety": {"loss_guard": {"window": 8, "skips": 1, "rollbacks": 1}, **safety},
        }
    )
    return StepGuard(
        recipe,
        RowsOfSteps(4),
        folder,
        device=CPU,
        tokens_per_step=256,
        highest_loss=math.inf,
        fp16=fp16,
    )


def verdict(step, loss=math.nan, norm=1.0, *, has_loss_spike=False):
    return StepVerdict(step, loss, norm, has_loss_spike, False)


def test_the_scaler_of_fp16_decides_about_infinite_gradients_of_a_finite_loss(tmp_path):
    for fp16, loss, action in (
        (True, 2.0, "continue"),
        (True, math.nan, "skip"),
        (False, 2.0, "skip"),
    ):
        guard = step_guard(tmp_path, fp16=fp16)
        assert guard.decide(verdict(5, loss, math.inf)).action == action
        assert len(guard.skipped_since_log) == guard.budget.total == (action == "skip")


def test_bad_steps_are_skipped_then_roll_back_and_then_end_the_run(tmp_path):
    guard = step_guard(tmp_path)
    assert guard.decide(verdict(2, 3.0)).events == ()
    first = guard.decide(verdict(3))
    assert (first.action, first.step, first.reason) == ("skip", 3, "")
    (event,) = first.events
    assert event.kind == "nan_skipped" and event.details == {
        "step": 3,
        "rows": [8, 12],
        "loss": "nan",
        "gradient_norm": "1.0",
    }
    assert event.message == "Step 3 was skipped: its loss was nan. Its rows are 8 to 11."
    back = guard.decide(verdict(5, 9.0, has_loss_spike=True))
    assert [event.kind for event in back.events] == ["spike_skipped"]
    assert (back.action, back.step, back.first_step) == ("roll_back", 5, 3)
    assert back.left_out == ((8, 12), (16, 20))
    assert back.reason == "2 of the last 8 steps were skipped (3, 5), roll-back 1 of 1"
    assert guard.decide(verdict(8)).action == "skip"
    end = guard.decide(verdict(9))
    assert (end.action, end.step, len(end.events)) == ("abort", 9, 1)
    assert end.reason.startswith(
        "the training diverged: steps 8, 9 were skipped, after 1 roll-back(s) (4 skipped steps"
    )


def test_a_handler_sees_the_spike_and_may_end_the_run(tmp_path):
    guard = step_guard(tmp_path, on_spike="abort")
    seen = []
    own = guard.handler

    def handler(spike):
        seen.append(spike)
        return own(spike) if len(seen) > 1 else None

    guard.handler = handler
    assert guard.decide(verdict(3, norm=2.0)).action == "skip"
    end = guard.decide(verdict(4))
    assert (end.action, end.step) == ("abort", 4)
    assert end.reason == (
        "step 4 was skipped: its loss was nan. `safety.on_spike: abort` ends the run."
    )
    assert [(one.step, one.recent, one.rollbacks, one.run_folder) for one in seen] == [
        (3, 1, 0, tmp_path),
        (4, 2, 0, tmp_path),
    ]
    assert (seen[0].gradient_norm, math.isnan(seen[0].loss)) == (2.0, True)


def test_the_level_of_the_loss_is_forgotten_in_the_first_step_of_a_phase(tmp_path):
    guard = step_guard(tmp_path, phases=(640, 1536))
    forgotten = []
    for step in range(1, 11):
        guard.detector.forget = lambda step=step: forgotten.append(step)
        guard.begin_step(step)
    assert forgotten == [3, 7]  # 640 tokens end in step 3, 1536 with step 6
    without = step_guard(tmp_path, phases=(640,), loss_guard=None)
    without.begin_step(3)
    assert list(without.decisions()) == []


def test_a_guard_resumes_with_its_skips_and_rows(tmp_path):
    guard = step_guard(tmp_path)
    guard.decide(verdict(3))
    guard.rows.leave_out([(8, 12), (40, 44)])
    state = guard.state_dict()
    again = step_guard(tmp_path)
    again.load_state_dict(state)
    assert again.rows.left_out == [(8, 12), (40, 44)] and again.state_dict() == state
    assert again.decide(verdict(5)).action == "roll_back"
    older = step_guard(tmp_path)
    older.load_state_dict({})
    assert older.state_dict() == step_guard(tmp_path).state_dict()
