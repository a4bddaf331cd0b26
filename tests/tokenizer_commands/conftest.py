"""Run `cpt tokenizer` as a user does, and read what it prints."""

import pytest

from cpt.cli import main


@pytest.fixture
def cpt_tokenizer(capsys):
    def run(*words: object) -> tuple[int, str]:
        code = 0
        try:
            main(["tokenizer", *map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run
