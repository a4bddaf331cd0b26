from cpt.errors import DataError
from cpt.preflight.found import PreflightReport


def fail():
    raise DataError("a.txt is empty")


def test_a_complaint_is_noted_and_the_checks_go_on():
    found = PreflightReport()
    assert found.run(fail) is None and found.run(lambda: 7) == 7
    assert [str(mistake) for mistake in found.mistakes] == ["a.txt is empty"]
