import errno
import os
import signal
import sqlite3

import pytest
from full_disk import files_end_at
from tiny_search import space_in

from cpt.errors import CheckpointError, ResourceError
from cpt.search.study import STUDY, open_study, storage_errors


def test_a_full_disk_is_told_and_spoils_nothing(tmp_path):
    study = open_study(tmp_path, space_in(tmp_path), 1000)
    trial = study.ask()
    values = study.values_of(trial)
    study.report(trial, 100, 3.0)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        size = os.path.getsize(tmp_path / STUDY)
        full = pytest.raises(ResourceError, match=r"study.db cannot be written.*the same command goes on")
        with full, storage_errors(tmp_path / STUDY), files_end_at(size):
            trial.set_user_attr("long", "x" * size)
    finally:
        signal.signal(signal.SIGXFSZ, ignored)
    again = open_study(tmp_path, space_in(tmp_path), 1000)
    (unfinished,) = again.unfinished()
    assert again.values_of(unfinished) == values and again.trials[0].intermediate_values == {100: 3.0}
    again.end(unfinished, "complete", 1.0, "")
    assert again.trials[0].value == 1.0


def test_what_else_does_not_fit_on_the_disk_is_told_too(tmp_path):
    full = pytest.raises(ResourceError, match=r"best.yaml cannot be written: No space left.*the same command goes on")
    with full, storage_errors(tmp_path / STUDY):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "best.yaml"))


def test_a_file_that_is_no_study_is_refused(tmp_path):
    (tmp_path / STUDY).write_bytes(b"rubbish" * 1000)
    with pytest.raises(CheckpointError, match=r"study.db is damaged"):
        open_study(tmp_path, space_in(tmp_path), None)


def test_another_databases_tables_are_no_study_either(tmp_path):
    with sqlite3.connect(tmp_path / STUDY) as other:
        other.execute(
            "create table version_info (version_info_id integer primary key, schema_version integer, library_version"
            " text)"
        )
        other.execute("insert into version_info values (1, 3, '0.0.1')")
    with pytest.raises(CheckpointError, match="another version of Optuna"):
        open_study(tmp_path, space_in(tmp_path), None)


def test_values_of_trials_with_other_batches_meet_in_the_same_cells(tmp_path):
    study = open_study(tmp_path, space_in(tmp_path), 1000)
    trial = study.ask()
    for tokens, value in ((12, 3.0), (17, 2.9), (24, 2.0), (24, 1.0)):
        study.report(trial, tokens, value)
    assert study.trials[0].intermediate_values == {
        10: 3.0,
        20: 2.0,
    }, "the first in each hundredth, and what is repeated is not"
