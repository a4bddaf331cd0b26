import subprocess

from cpt.runs.environment import describe_environment, git_state, installed_version


def test_the_environment_names_versions_and_command():
    environment = describe_environment()
    assert environment["versions"]["torch"] and environment["command"] and environment["processes"] == 1


def test_a_package_that_is_not_there_has_no_version():
    assert installed_version("no-such-package-at-all") is None


def test_the_uncommitted_change_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    for command in ("init -q", "add a.txt", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *command.split()], check=True)
    (tmp_path / "a.txt").write_text("two\n")
    state = git_state()
    assert state is not None and len(state["commit"]) == 40 and "+two" in state["diff"]


def test_outside_a_repository_there_is_no_git_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_state() is None
