import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from cpt.data.store import TokenStore, TokenWriter, key_of, publish_once
from cpt.errors import DataError, ResourceError

SLOW_FILL = """
import sys, time
from pathlib import Path
from cpt.data.store import publish_once
def fill(folder):
    (folder / "half").write_text("half")
    print("filling", flush=True)
    time.sleep(60)
publish_once(Path(sys.argv[1]), fill)
"""


def write_two_documents(folder):
    writer = TokenWriter(folder, np.dtype(np.uint16))
    writer.append(np.array([1, 2, 3], np.uint16), np.array([3]), np.array([2**64 - 1], np.uint64), np.array([5]))
    writer.append(np.array([4], np.uint16), np.array([1]), np.array([7], np.uint64), np.array([1]))
    writer.close({"empty": 2}, {"a.txt": "hash"})


@pytest.fixture
def store(tmp_path):
    return TokenStore(publish_once(tmp_path / "store", write_two_documents))


def test_a_store_gives_back_what_was_written(store):
    assert store.tokens.tolist() == [1, 2, 3, 4] and store.tokens.dtype == np.uint16
    assert store.offsets.tolist() == [0, 3, 4]
    assert store.hashes.tolist() == [2**64 - 1, 7] and store.num_bytes.tolist() == [5, 1]
    assert (store.description.documents, store.description.tokens, store.description.dropped) == (2, 4, {"empty": 2})


def test_a_store_travels_to_other_processes_by_its_name(store):
    assert len(pickle.dumps(store)) < 500
    assert pickle.loads(pickle.dumps(store)).tokens.tolist() == store.tokens.tolist()


def test_the_digest_follows_the_tokens(store, tmp_path):
    def write_others(folder):
        writer = TokenWriter(folder, np.dtype(np.uint16))
        writer.append(np.array([1, 2, 3, 4], np.uint16), np.array([2, 2]), np.array([2**64 - 1, 7], np.uint64), np.array([5, 1]))
        writer.close({}, {})

    assert TokenStore(publish_once(tmp_path / "same", write_two_documents)).description.digest == store.description.digest
    assert TokenStore(publish_once(tmp_path / "other", write_others)).description.digest != store.description.digest


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "description.json"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_store_says_to_delete_it(store, name, damage):
    file = store.folder / name
    os.truncate(file, file.stat().st_size // 2) if damage == "cut" else file.unlink()
    with pytest.raises(DataError, match="damaged.*Delete the folder"):
        TokenStore(store.folder)


def test_what_exists_is_not_made_again(tmp_path):
    publish_once(tmp_path / "a", lambda folder: None)
    publish_once(tmp_path / "a", lambda folder: pytest.fail("filled twice"))


def test_a_failed_fill_leaves_nothing_that_looks_complete(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise DataError("bad row")

    with pytest.raises(DataError, match="bad row"):
        publish_once(tmp_path / "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_a_killed_process_leaves_nothing_that_looks_complete(tmp_path):
    folder = tmp_path / "a"
    process = subprocess.Popen([sys.executable, "-c", SLOW_FILL, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "filling\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    publish_once(folder, write_two_documents)
    assert TokenStore(folder).description.documents == 2 and not (folder / "half").exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a"]


def fill_slowly(root, filled):
    def fill(folder):
        with filled.get_lock():
            filled.value += 1
        time.sleep(0.2)
        write_two_documents(folder)

    publish_once(root / "a", fill)
    assert TokenStore(root / "a").description.documents == 2


def test_several_processes_fill_a_store_once(tmp_path):
    context = multiprocessing.get_context("fork")
    filled = context.Value("i", 0)
    processes = [context.Process(target=fill_slowly, args=(tmp_path, filled)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert filled.value == 1


def test_a_place_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot keep tokenised data there.*CPT_CACHE"):
        publish_once(tmp_path / "file" / "store", lambda folder: None)


def test_equal_content_has_an_equal_key():
    assert key_of({"a": 1, "b": [2]}) == key_of(json.loads('{"b": [2], "a": 1}')) != key_of({"a": 1, "b": [3]})
