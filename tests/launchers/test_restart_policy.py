import pytest

from cpt.launchers.restart_policy import Ended, next_move


def ended(step=5, *, state="running", error=None, own_code=None, code=-9, hung=False, at=0.0):
    return Ended(code, state, error, own_code, "why", step, hung, at)


@pytest.mark.parametrize(
    ("last", "what", "code"),
    [
        (ended(state="finished", code=0), "done", 0),
        (ended(state="finished", code=1), "done", 0),  # a launcher that fails after the run is done
        (ended(state="interrupted", error="Interrupted", own_code=75), "stop", 75),
        (ended(state="interrupted", error="RestartNeeded", own_code=75), "again", 0),
        (ended(state="failed", error="RecipeError", own_code=2), "give up", 2),
        (ended(state="failed", error="LaunchError", own_code=2), "again", 0),
        (ended(state="failed", error="ValueError", own_code=1), "again", 0),
        (ended(), "again", 0),
        (ended(hung=True), "again", 0),
    ],
)
def test_how_an_attempt_ended_decides(last, what, code):
    decision = next_move([last], restarts=3)
    assert (decision.what, decision.code) == (what, code)


@pytest.mark.parametrize(
    ("last", "what", "code"),
    [
        (ended(state="finished", code=0), "done", 0),
        (ended(state="interrupted", error="Interrupted", own_code=75), "stop", 75),
        (ended(state="interrupted", error="RestartNeeded", own_code=75), "again", 0),
        (ended(state="failed", error="RecipeError", own_code=2), "give up", 2),
        (ended(state="failed", error="LaunchError", own_code=2), "give up", 2),
        (ended(state="failed", error="ValueError", own_code=1), "give up", 1),
        (ended(), "give up", 1),
        (ended(hung=True), "give up", 1),
    ],
)
def test_without_supervision_a_run_is_started_once_and_its_code_passed_on(last, what, code):
    decision = next_move([last], restarts=None)
    assert (decision.what, decision.code) == (what, code)


def test_the_same_step_three_times_is_enough():
    assert next_move([ended(5), ended(5)], restarts=10).what == "again"
    decision = next_move([ended(5), ended(9), ended(5), ended(5)], restarts=10)
    assert decision.what == "give up" and "after step 5" in decision.why and decision.code == 1


def test_restarts_are_counted_in_an_hour():
    assert next_move([ended(step, at=step) for step in range(4)], restarts=3).what == "give up"
    assert next_move([ended(step, at=3000.0 * step) for step in range(4)], restarts=3).what == "again"


def test_learning_to_need_less_memory_is_no_failure():
    learning = [ended(5, state="interrupted", error="RestartNeeded", own_code=75)] * 6
    assert next_move(learning, restarts=3).what == "again"


def test_a_recipe_may_refuse_restarts():
    assert next_move([ended()], restarts=3, resumes=False).what == "give up"
    assert next_move([ended(state="interrupted", error="RestartNeeded")], restarts=3, resumes=False).what == "again"
