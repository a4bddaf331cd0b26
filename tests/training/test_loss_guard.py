import math

import pytest
import torch

from cpt.data.rows.mixture import RowsOfSteps
from cpt.errors import RecipeError
from cpt.recipe.schema import Component
from cpt.recipe.schema import LossGuard as Section
from cpt.training.loss_guard import STEPS_BEHIND, SkipBudget, SpikeDetector, StepVerdict, check_loss_guard

CPU = torch.device("cpu")


def guard(**options):
    return SpikeDetector(Section(**options), CPU)


def verdicts(guard, losses, norms=None):
    """Whether each step is skipped."""
    found = []
    for step, loss in enumerate(losses, start=1):
        guard.check(step, torch.tensor([loss, norms[step - 1] if norms else 1.0]))
        found += [verdict.is_skipped for verdict in guard.read()]
    return found


def healthy(num_steps, *, seed=0, noise=0.03, norm_noise=0.3):
    """A loss that falls fast and then slowly, and a gradient norm that falls and jumps about."""
    draw = torch.Generator().manual_seed(seed)
    step = torch.arange(num_steps)
    losses = 2 + 9 * torch.exp(-step / 30) + 1.5 * torch.exp(-step / 800)
    losses = losses * (1 + noise * torch.randn(num_steps, generator=draw))
    norms = (0.4 + 5 * torch.exp(-step / 60)) * torch.exp(norm_noise * torch.randn(num_steps, generator=draw))
    return losses.tolist(), norms.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_skipped_from_the_first_step_on(bad):
    assert verdicts(guard(), [bad, 5.0, bad, 5.0]) == [True, False, True, False]
    assert verdicts(guard(), [5.0, 5.0, 5.0], [bad, 1.0, bad]) == [True, False, True]


@pytest.mark.parametrize("highest", [math.inf, 100.0])
def test_a_spike_in_the_first_steps_is_skipped_and_a_loss_that_doubles_is_none(highest):
    one = SpikeDetector(Section(), CPU, highest)
    assert verdicts(one, [5.0, 1e6, 5.0, 10.0, 1e6, 5.0]) == [False, True, False, False, True, False]


def test_the_first_step_is_skipped_where_its_loss_is_above_what_a_language_model_can_have():
    assert verdicts(SpikeDetector(Section(), CPU, 100.0), [1e6, 101.0, 99.0, 12.0]) == [True, True, False, False]
    assert verdicts(SpikeDetector(Section(), CPU), [1e6, 5.0]) == [False, False]


@pytest.mark.parametrize("after", [6, 20, 300])
def test_a_spike_of_the_loss_or_of_the_gradient_is_skipped_and_not_remembered(after):
    losses, norms = healthy(after + 3)
    assert verdicts(guard(), [*losses[:after], losses[after] * 1e4, *losses[after + 1 :]], norms) == [
        False
    ] * after + [True, False, False]
    assert verdicts(guard(), losses, [*norms[:after], norms[after] * 1e4, *norms[after + 1 :]]) == [False] * after + [
        True,
        False,
        False,
    ]


def test_a_loss_of_twice_the_last_ones_is_a_spike_and_one_of_five_fourths_is_none():
    losses = [3.0 + 0.01 * (step % 7) for step in range(200)]
    assert verdicts(guard(), [*losses, 6.0, 3.75, 3.0])[-3:] == [True, False, False]


def test_a_better_loss_is_no_spike():
    assert not any(verdicts(guard(), [11.0] * 50 + [2.0] * 5 + [0.1] * 5, [9.0] * 50 + [0.01] * 10))


def test_healthy_runs_raise_no_false_alarm():
    skipped = 0
    for seed in range(5):
        skipped += sum(
            verdicts(guard(), *healthy(1000, seed=seed, noise=0.02 * (seed + 1), norm_noise=0.2 * (seed + 1)))
        )
    assert skipped <= 1, f"{skipped} of 5,000 steps"


def test_a_slow_rise_as_after_a_rewarming_is_no_spike():
    losses = [2.0] * 200 + [2.0 + 0.5 * step / 100 for step in range(100)] + [2.5] * 100
    assert not any(verdicts(guard(), losses))


def test_a_resumed_guard_decides_as_the_one_that_was_not_interrupted():
    losses, norms = healthy(400)
    losses[350] *= 30
    straight = guard(window=64)
    expected = verdicts(straight, losses, norms)
    first, second = guard(window=64), guard(window=64)
    before = verdicts(first, losses[:330], norms[:330])
    second.restore(first.state())
    assert before + verdicts(second, losses[330:], norms[330:]) == expected and expected[350]
    assert second.state() == straight.state()


def test_a_new_level_is_no_spike_where_the_guard_was_told_to_forget():
    levels = [1.0] * 50 + [4.0] * 10
    told, untold = guard(), guard()
    assert any(verdicts(untold, levels))
    before = verdicts(told, levels[:50])
    told.forget()
    assert not any(before + verdicts(told, levels[50:]))


def test_the_host_reads_in_order_and_may_stay_behind():
    watcher = guard()
    for step in range(1, 7):
        watcher.check(step, torch.tensor([float(step), 1.0]))
        read = [(verdict.step, verdict.loss) for verdict in watcher.read(unread=STEPS_BEHIND)]
        assert read == ([(step - STEPS_BEHIND, step - STEPS_BEHIND)] if step > STEPS_BEHIND else [])
    assert [verdict.step for verdict in watcher.read()] == [5, 6]


def test_a_step_is_judged_without_leaving_the_device():
    """Tensors of the device `meta` have no values, so nothing can depend on them, and do not meet those of the
    host."""
    watcher = guard()
    watcher.history, watcher.accepted = watcher.history.to("meta"), watcher.accepted.to("meta")
    noted = []
    watcher.note = lambda step, verdict: noted.append(verdict)
    skip = watcher.check(1, torch.zeros(2, device="meta"))
    assert skip.device.type == noted[0].device.type == watcher.history.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        bool(skip)


def test_options_are_checked_before_the_run():
    check_loss_guard(None)
    check_loss_guard(Section(window=64, sigmas=5, skips=0, rollbacks=1))
    mistakes = {
        "sigmas": {"sigma": 5},
        "at least 5": {"window": 3},
        "more than 0": {"sigmas": 0},
        "number": {"skips": "many"},
    }
    for says, wrong in mistakes.items():
        with pytest.raises(RecipeError, match=says):
            check_loss_guard(Section(**wrong))
    with pytest.raises(RecipeError, match="robust"):
        check_loss_guard(Component(name="robast"))


def test_a_norm_that_is_known_later_takes_its_place_beside_its_loss():
    at_once, later = (SpikeDetector(Component(name="robust"), torch.device("cpu")) for _ in range(2))
    for step in range(1, 12):
        loss, norm = torch.tensor(3.0 + 0.01 * step), torch.tensor(1.0 + 0.1 * (step % 3))
        loss = loss * torch.nan if step == 7 else loss
        at_once.check(step, torch.stack((loss, norm)))
        skipped, _ = later.decide(torch.stack((loss, torch.zeros(()))))
        later.learn_norm(norm, skipped=skipped)
        assert bool(skipped) is (step == 7)
    assert torch.equal(at_once.history, later.history) and later.accepted == 10


# --- the budget of skipped steps ---


def note(budget, *steps, bad=()):
    for step in steps:
        budget.note(StepVerdict(step, math.nan if step in bad else 2.0, 1.0, False, False))


def budget(skips=2, window=10):
    return SkipBudget(RowsOfSteps(4), window, skips)


def test_more_skips_than_allowed_within_the_window_exhaust_it():
    one = budget()
    note(one, *range(1, 8), bad=(3, 5))
    assert not one.is_exhausted
    note(one, 8, bad=(8,))
    assert one.is_exhausted and one.total == 3


def test_a_roll_back_names_the_skipped_steps_with_their_rows():
    one = budget()
    note(one, *range(1, 6), bad=(2, 3, 5))
    bad = one.roll_back()
    assert [skipped.step for skipped in bad] == [2, 3, 5] and one.rollbacks == 1 and not one.recent
    assert [skipped.rows for skipped in bad] == [(4, 8), (8, 12), (16, 20)]


def test_its_state_goes_through_json_and_comes_back():
    one, other = budget(), budget()
    note(one, *range(1, 6), bad=(2, 3))
    other.restore(one.state())
    assert other == one
