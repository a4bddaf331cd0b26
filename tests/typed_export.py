"""`cpt export` as it is typed, in this process."""

from typer.testing import CliRunner

from cpt.cli import application


def export(*words):
    """What the command prints; its errors as they are raised."""
    result = CliRunner().invoke(application(), ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output
