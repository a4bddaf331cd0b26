"""A folder is shared where each node reads what the others wrote; the node that stands alone is named."""

from cpt.cluster import shared_folders
from cpt.cluster.shared_folders import Token, unshared, unwritable

FOLDERS = dict.fromkeys(["host-0", "host-1", "host-2"], "/runs")


def test_tokens_of_a_shared_folder_are_seen_and_go_with_the_folders_made_for_them(tmp_path):
    tokens = [Token(tmp_path / "runs" / "a", node) for node in range(2)]
    names = {str(node): token.write()["token"] for node, token in enumerate(tokens)}
    assert [token.unseen(names) for token in tokens] == [[], []]
    for token in tokens:
        token.remove()
    for token in tokens:
        token.remove_folders()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_wrote_into_stays(tmp_path):
    token = Token(tmp_path / "runs", 0)
    token.write()
    (tmp_path / "runs" / "tiny").mkdir()
    token.remove()
    token.remove_folders()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]


def test_another_folder_lacks_the_token(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "SECONDS_TO_APPEAR", 0.1)
    name = Token(tmp_path / "one", 0).write()["token"]
    assert Token(tmp_path / "other", 1).unseen({"0": name}) == ["0"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "runs").write_text("a file")
    written = {"host-0": Token(tmp_path, 0).write(), "host-1": Token(tmp_path / "runs" / "a", 1).write()}
    (complaint,) = unwritable("the output folder", written, fatal=True)
    assert complaint.host == "host-1" and "Not a directory" in complaint.cause


def test_the_node_that_stands_alone_is_named():
    unseen = {"host-0": ["host-1"], "host-1": ["host-0", "host-2"], "host-2": ["host-1"]}
    (complaint,) = unshared("the output folder", "Mount it.", FOLDERS, unseen, fatal=True)
    assert complaint.host == "host-1" and "is not the folder that host-0, host-2 see" in complaint.cause


def test_of_two_nodes_the_master_is_right():
    unseen = {"host-0": ["host-1"], "host-1": ["host-0"]}
    folders = {host: FOLDERS[host] for host in unseen}
    assert [complaint.host for complaint in unshared("it", "", folders, unseen, fatal=True)] == ["host-1"]
    assert unshared("it", "", folders, {"host-0": [], "host-1": []}, fatal=True) == []
