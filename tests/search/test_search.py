"""The loop, with trials that are functions of their values."""

import signal

import pytest
from tiny_search import Curve, space_in, study_in_memory

from cpt.errors import Interrupted, RecipeError, TrainingError
from cpt.search.search import Search, without_figures
from cpt.search.study import open_study
from cpt.search.trial import Ending


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    monkeypatch.setattr("cpt.search.search.SECONDS_BETWEEN_LOOKS", 0.0)


def searched(folder, start=Curve, parallel=1, opened=study_in_memory, **settings):
    study = opened(space_in(folder, **settings))
    Search(study, start, parallel).run()
    return study


def told(study):
    return [(trial.number, trial.params, trial.state.name, trial.value) for trial in study.trials]


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the search does on its way out may happen."""


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()

    def on_disk(space):
        return open_study(tmp_path / "killed", space, 1000)

    whole = searched(tmp_path / "whole", pruner="none")

    def killed_at(number, look):
        def start(draw):
            trial = Curve(draw)
            if draw.number == number:
                monkeypatch.setattr(
                    trial, "look", lambda: die() if trial.looks == look else Curve.look(trial), raising=False
                )
            return trial

        return start

    def die():
        raise Killed

    for number, look in ((0, 0), (2, 2), (2, 4), (5, 1)):
        with pytest.raises(Killed):
            searched(tmp_path / "killed", killed_at(number, look), opened=on_disk, pruner="none")
    begun = []
    study = searched(
        tmp_path / "killed", lambda draw: begun.append(draw.number) or Curve(draw), opened=on_disk, pruner="none"
    )
    assert told(study) == told(whole), "the same draws, the same figures"
    assert begun == [5], "what was finished is not done again"


def test_trials_that_are_not_among_the_better_ones_are_pruned_and_say_so(tmp_path):
    study = searched(
        tmp_path, trials=12, pruner={"name": "median", "startup_trials": 2, "warmup_tokens": 300}, sampler="random"
    )
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert pruned and all("not among the better ones" in trial.user_attrs["pruned"] for trial in pruned)
    assert min(max(trial.intermediate_values) for trial in pruned) >= 300, "not while it warms up"
    best = min((trial for trial in study.trials if trial.state.name == "COMPLETE"), key=lambda trial: trial.value)
    assert best.value <= min(trial.intermediate_values[max(trial.intermediate_values)] for trial in pruned)


def test_two_trials_at_once_have_places_of_their_own(tmp_path):
    running, together = set(), []

    class Counted(Curve):
        def look(self):
            running.add(self.draw.slot)
            together.append(len(running))
            points, ending = super().look()
            if ending:
                running.remove(self.draw.slot)
            return points, ending

    study = searched(tmp_path, Counted, parallel=2, pruner="none")
    assert len(study.trials) == 6 and max(together) == 2


class Failing(Curve):
    def look(self):
        return [], Ending("failed", reason=f"DataError: row {self.draw.number} is no text")


def test_the_same_error_again_and_again_ends_the_search_with_it(tmp_path):
    opened = [study_in_memory(space_in(tmp_path))]
    with pytest.raises(TrainingError, match=r"3 trials in a row failed with the same error.*row 2 is no text"):
        searched(tmp_path, Failing, opened=lambda _: opened[0])
    assert [trial.state.name for trial in opened[0].trials] == ["FAIL"] * 3


def test_a_trial_that_fails_by_its_values_is_a_result(tmp_path):
    class Diverging(Curve):
        def look(self):
            return [], Ending("failed", reason="TrainingError: the loss diverged", is_of_values=True)

    def start(draw):
        if draw.number < 4:
            return Diverging(draw)
        if draw.number == 4:
            raise RecipeError("these values do not fit together")
        return Curve(draw)

    study = searched(tmp_path, start, pruner="none")
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 5 + ["COMPLETE"]
    assert "do not fit together" in study.trials[4].user_attrs["reason"]


def test_a_signal_stops_the_trials_which_go_on_with_the_next_search(tmp_path):
    def start(draw):
        if draw.number == 2:
            signal.raise_signal(signal.SIGTERM)
        return Curve(draw)

    study = study_in_memory(space_in(tmp_path, pruner="none"))
    with pytest.raises(Interrupted, match="SIGTERM"):
        searched(tmp_path, start, opened=lambda _: study)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2 + ["RUNNING"]
    assert len(searched(tmp_path, opened=lambda _: study).trials) == 6


def test_a_trial_that_was_told_to_stop_by_others_stops_the_search(tmp_path):
    class Preempted(Curve):
        def look(self):
            return [], Ending("stopped", reason="stopped by SIGTERM: checkpoint-5 is saved")

    study = study_in_memory(space_in(tmp_path))
    with pytest.raises(Interrupted, match="checkpoint-5"):
        searched(tmp_path, Preempted, opened=lambda _: study)
    assert len(study.unfinished()) == 1


def test_what_was_going_to_be_pruned_is_not_trained_on(tmp_path):
    study = study_in_memory(space_in(tmp_path, pruner="none"))
    trial = study.ask()
    study.values_of(trial)
    trial.set_user_attr("pruned", "it was bad")
    seen = []
    searched(tmp_path, lambda draw: seen.append((draw.number, draw.pruned)) or Curve(draw), opened=lambda _: study)
    assert seen[0] == (0, "it was bad") and seen[1] == (1, "")


def test_errors_are_alike_whatever_their_figures():
    assert without_figures("DataError: row 12\nmore") == without_figures("DataError: row 3\nless")
