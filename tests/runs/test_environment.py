import subprocess

from cpt.runs.record import deciding_variables, git_state


def test_of_the_variables_only_those_that_decide_figures_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    variables = deciding_variables()
    assert variables["OMP_NUM_THREADS"] == "3" and "HF_TOKEN" not in variables


def test_the_uncommitted_change_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    for command in ("init -q", "add a.txt", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *command.split()], check=True)
    (tmp_path / "a.txt").write_text("two\n")
    state = git_state()
    assert state is not None and len(state["commit"]) == 40 and "+two" in state["diff"]
