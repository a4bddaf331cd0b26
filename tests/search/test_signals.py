import signal
import threading

from cpt.search.signals import Signals


def test_signals_are_noted_and_given_back():
    before, signals = signal.getsignal(signal.SIGTERM), Signals()
    with signals.noted():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (signals.first, signals.count) == (signal.SIGTERM, 2) and signals.wake.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_a_thread_they_are_left_alone():
    found = []

    def work():
        with Signals().noted():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
