import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpt.data.store import claims as module
from cpt.data.store.claims import Claims
from cpt.errors import ResourceError


def test_only_one_of_many_gets_a_claim(tmp_path):
    workers = [Claims(f"{number}/8") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda worker: worker.take(tmp_path / "claims" / "a"), workers))
    assert taken.count(True) == 1


def test_what_is_let_go_can_be_claimed(tmp_path):
    with Claims("1/2") as first:
        assert first.take(tmp_path / "a") and not Claims("2/2").take(tmp_path / "a")
    assert Claims("2/2").take(tmp_path / "a"), "at the end everything is let go"


def test_a_dead_workers_claim_is_taken_over_by_one(tmp_path):
    assert Claims("1/9").take(tmp_path / "a")
    os.utime(tmp_path / "a", (time.time() - module.DEAD_AFTER_SECONDS - 5,) * 2)
    others = [Claims(f"{number}/9") for number in range(2, 10)]
    assert [other.take(tmp_path / "a") for other in others].count(True) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_worker_that_was_started_again_goes_on_with_its_own_claims(tmp_path):
    assert Claims("1/2").take(tmp_path / "a")
    assert Claims("1/2").take(tmp_path / "a")


def test_a_living_worker_keeps_its_claims_however_long_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_TOUCHES", 0.05)
    monkeypatch.setattr(module, "DEAD_AFTER_SECONDS", 0.4)
    with Claims("1/2") as first:
        first.take(tmp_path / "a")
        time.sleep(0.8)
        assert not Claims("2/2").take(tmp_path / "a")


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot keep tokenised data"):
        Claims("1/2").take(tmp_path / "file" / "claims" / "a")
