import shutil

import pytest

from cpt.checkpoints.transaction import MIB, RESERVE, refuse_small_disk


def test_a_disk_must_have_room_for_the_checkpoint_and_what_else_the_run_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 50 * MIB + RESERVE))
    refuse_small_disk(tmp_path, 50 * MIB)
    with pytest.raises(
        OSError, match=r"the checkpoint takes 51 MiB and 16 MiB for what else .*, and .* has 66 MiB free"
    ):
        refuse_small_disk(tmp_path, 51 * MIB)
