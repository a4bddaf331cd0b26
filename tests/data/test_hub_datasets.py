import json

import pytest
from loopback_hub import TOKEN, Client, Hub

pytestmark = pytest.mark.heavy  # a process takes this one for the Hub

READ = """
result = None
from cpt.data.readers import hub as hub_files
from cpt.data.readers.sources import files_of, kind_of, pieces_of, read_piece, states_of
from cpt.recipe.schema import Source
import huggingface_hub
hub_files.find.cache_clear()
hub_files.commit_of.cache_clear()
huggingface_hub.HfFileSystem.clear_instance_cache()
source = Source(**{options!r})
pieces = pieces_of(source, "k", {piece_bytes})
"""
TEXTS = "result = [item.text for piece in pieces for item in read_piece(source, piece, 'k')]"


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub
        hub.shutdown()


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    client = Client(hub, tmp_path_factory.mktemp("home"))
    yield client
    client.close()


@pytest.fixture
def run(client):
    """`run(code, path="owner/name", ...)`: what the code gives for a source."""

    def run(code, piece_bytes=1000, environment=None, **options):
        return client(
            READ.format(options=options, piece_bytes=piece_bytes) + code, **(environment or {})
        )

    return run


def lines(name, count=3):
    return "".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count))


def rows(name, count=3):
    return [f"{name} {number}" for number in range(count)]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_files_of_a_split_are_read_in_pieces(hub, run, streaming):
    files = {
        "data/train-0.jsonl": lines("a", 200),
        "data/train-1.jsonl": lines("b", 50),
        "data/test-0.jsonl": lines("test"),
    }
    path = f"lab/pieces-{streaming}"
    commit = hub.commit(path, files)
    assert run(TEXTS, path=path, streaming=streaming) == rows("a", 200) + rows("b", 50)
    assert run(TEXTS, path=path, streaming=streaming, split="test") == rows("test")
    names = run("result = [file[:2] for file in files_of(source, 'k')]", path=path)
    assert names == [
        [f"hf://datasets/{path}@{commit}/{name}", len(files[name])] for name in sorted(files)[1:]
    ]
    pieces = run(
        "result = [(piece.start, piece.stop) for piece in pieces]", path=path, piece_bytes=1500
    )
    assert pieces == [[0, 1500], [1500, 3000], [3000, None], [0, None]]


CARD = """---
configs:
- {config_name: small, data_files: s/*}
- {config_name: large, data_files: [{split: train, path: l/*}]}
---
"""


def test_a_subset_is_what_the_card_says(hub, run):
    files = {f"{name}.jsonl": lines(name) for name in ("s/1", "l/1", "l/2")}
    hub.commit("lab/card", {"README.md": CARD, **files})
    assert run(TEXTS, path="lab/card", subset="small") == rows("s/1")
    assert run(TEXTS, path="lab/card", subset="large") == rows("l/1") + rows("l/2")
    for options, there in [
        ({"subset": "huge"}, "small"),
        ({}, "large"),
        ({"subset": "small", "split": "dev"}, "train"),
    ]:
        with pytest.raises(RuntimeError, match=f"^DataError: .*{there}"):
            run(TEXTS, path="lab/card", **options)


def test_a_pinned_revision_stays_and_a_moved_branch_is_noticed(hub, run):
    first = hub.commit("lab/moved", {"a.jsonl": lines("old")})
    ((name, size, before),) = run("result = states_of(source, 'k')", path="lab/moved")
    second = hub.commit("lab/moved", {"a.jsonl": lines("new")})
    with pytest.raises(RuntimeError, match="^DataError: .*`k.revision`"):
        run(TEXTS, path="lab/moved", revision="f" * 40)
    assert run(TEXTS, path="lab/moved", revision=first) == rows("old")
    assert (
        run(TEXTS, path="lab/moved") == run(TEXTS, path="lab/moved", revision="main") == rows("new")
    )
    ((other, same_size, after),) = run("result = states_of(source, 'k')", path="lab/moved")
    assert [name, other] == [
        f"hf://datasets/lab/moved@{commit}/a.jsonl" for commit in (first, second)
    ]
    assert size == same_size and before != after


def test_private_and_gated_datasets_need_a_token(hub, run):
    hub.commit("lab/private", {"a.jsonl": lines("secret")})
    hub.private.add("lab/private")
    with pytest.raises(RuntimeError, match=r"^ResourceError: lab/private: .*HF_TOKEN.*`k.path`"):
        run(TEXTS, path="lab/private")
    hub.commit("lab/gated", {"a.jsonl": lines("x")})
    hub.gated.add("lab/gated")
    with pytest.raises(RuntimeError, match="^ResourceError: .*datasets/lab/gated"):
        run(TEXTS, path="lab/gated")
    for streaming in (True, False):
        assert run(
            TEXTS, path="lab/private", streaming=streaming, environment={"HF_TOKEN": TOKEN}
        ) == rows("secret")


def test_streaming_fetches_about_what_a_piece_holds(hub, run):
    content = lines("x" * 100, 20_000).encode()
    hub.commit("lab/bounded", {"big.jsonl": content})
    hub.sent.clear()
    code = "result = len(list(read_piece(source, pieces[len(pieces) // 2], 'k')))"
    assert (
        1000
        <= run(code, path="lab/bounded", streaming=True, piece_bytes=len(content) // 10)
        <= 3000
    )
    assert len(content) // 10 <= hub.sent["big.jsonl"] <= len(content) // 10 + 3 * 2**16


@pytest.mark.parametrize("streaming", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_busy_hub_is_asked_again_and_a_broken_answer_is_resumed(hub, run, streaming):
    name = f"busy-{streaming}.jsonl"
    hub.commit(f"lab/busy-{streaming}", {name: lines("x", 100)})
    hub.failing[name] = 1
    hub.breaking.add(name)
    assert run(TEXTS, path=f"lab/busy-{streaming}", streaming=streaming) == rows("x", 100)
    assert hub.failing[name] == 0 and not hub.breaking


def test_a_card_with_options_for_the_reading_leaves_it_to_datasets(hub, run):
    card = '---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ";"\n---\n'
    hub.commit("lab/options", {"README.md": card, "a.csv": "n;text\n1;one\n2;two\n"})
    assert (
        run(TEXTS, path="lab/options")
        == run(TEXTS, path="lab/options", streaming=True)
        == ["one", "two"]
    )
    found = run(
        "result = [states_of(source, 'k'), [piece.path for piece in pieces]]", path="lab/options"
    )
    assert found == [[], ["lab/options"]]


def test_without_the_hub_a_dataset_is_what_it_was_last(hub, run, tmp_path):
    hub.commit("lab/offline", {"a.jsonl": lines("x")})
    home = run("import os; result = os.environ['HF_HOME']", path="lab/offline")
    assert run(TEXTS, path="lab/offline") == rows("x")
    offline = Client(hub, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=home, CPT_CACHE=f"{home}/cpt")
    ask = READ.format(options={"path": "lab/offline"}, piece_bytes=100) + TEXTS
    assert offline(ask) == rows("x")
    with pytest.raises(RuntimeError, match="^ResourceError: .*a.jsonl: "):
        offline(ask.replace("'lab/offline'", "'lab/offline', 'streaming': True"))
    offline.close()


def test_all_processes_of_a_run_read_the_commit_that_the_main_one_found(hub, run):
    hub.commit("lab/ranks", {"a.jsonl": lines("found")})
    assert run(TEXTS, path="lab/ranks") == rows("found")
    hub.commit("lab/ranks", {"a.jsonl": lines("moved")})
    assert run(TEXTS, path="lab/ranks", environment={"RANK": "1"}) == rows("found")
    assert run(TEXTS, path="lab/ranks") == rows("moved")


def test_a_resumed_run_reads_the_commit_that_it_began_with_also_without_the_hub(hub, run, tmp_path):
    first = hub.commit("lab/resumed", {"a.jsonl": lines("began")})
    home = run("import os; result = os.environ['HF_HOME']", path="lab/resumed")
    assert run(TEXTS, path="lab/resumed") == rows("began")
    hub.commit("lab/resumed", {"a.jsonl": lines("moved")})
    assert run(TEXTS, path="lab/resumed") == rows("moved")
    pinned = READ.replace(
        "pieces = ", f"hub_files.PINNED['lab/resumed@main'] = {first!r}\npieces = "
    )
    offline = Client(hub, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=home, CPT_CACHE=f"{home}/cpt")
    ask = pinned.format(options={"path": "lab/resumed"}, piece_bytes=100) + TEXTS
    assert offline(ask) == rows("began")
    offline.close()
