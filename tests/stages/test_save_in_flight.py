import threading

import pytest

from cpt.stages.saving import SaveInFlight


def test_in_the_foreground_it_is_done_when_it_returns():
    done = []
    SaveInFlight().run(lambda: done.append(threading.current_thread()), in_background=False)
    assert done == [threading.main_thread()]


def test_in_the_background_training_goes_on_until_it_waits():
    may_end, done, saves = threading.Event(), [], SaveInFlight()

    def save():
        may_end.wait(10)
        done.append(True)

    saves.run(save, in_background=True)
    assert not done
    may_end.set()
    saves.wait()
    assert done and saves.thread is None


def test_what_goes_wrong_in_the_background_is_raised_once_by_who_waits():
    saves = SaveInFlight()
    saves.run(lambda: 1 / 0, in_background=True)
    with pytest.raises(ZeroDivisionError):
        saves.wait()
    saves.wait()


def test_two_saves_at_once_are_refused():
    saves = SaveInFlight()
    saves.run(lambda: None, in_background=True)
    with pytest.raises(AssertionError, match="at most one"):
        saves.run(lambda: None, in_background=True)
    saves.wait()
