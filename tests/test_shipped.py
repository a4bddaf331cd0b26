"""What comes with cpt is found beside the package, or inside an installed one."""

import shutil

from cpt import shipped


def test_in_a_clone_the_files_are_at_its_top():
    assert (shipped.SHIPPED_FILES / "pyproject.toml").is_file() and (
        shipped.SHIPPED_FILES / "recipes/demo.yaml"
    ).is_file()


def test_in_an_installed_package_the_files_are_inside(tmp_path, monkeypatch):
    package = tmp_path / "cpt"
    (package / "shipped").mkdir(parents=True)
    monkeypatch.setattr(shipped, "__file__", str(shutil.copy(shipped.__file__, package)))
    assert shipped.folder_of_shipped_files() == package / "shipped"


def test_the_program_behind_a_launcher_is_the_file_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(shipped.SHIPPED_FILES)
    assert shipped.training_program() == "cpt/train.py"
    monkeypatch.chdir(tmp_path)
    assert shipped.training_program() == "-m cpt.train"
