"""What comes with cpt is found beside the package, or inside an installed one."""

import shutil

from cpt import files


def test_in_a_clone_the_files_are_at_its_top():
    assert (files.SHIPPED_FILES / "pyproject.toml").is_file() and (files.SHIPPED_FILES / "recipes/demo.yaml").is_file()


def test_in_an_installed_package_the_files_are_inside(tmp_path, monkeypatch):
    package = tmp_path / "cpt"
    (package / "shipped").mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(shutil.copy(files.__file__, package)))
    assert files.find_shipped_files() == package / "shipped"


def test_the_program_behind_a_launcher_is_the_file_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(files.SHIPPED_FILES)
    assert files.training_program() == "cpt/train.py"
    monkeypatch.chdir(tmp_path)
    assert files.training_program() == "-m cpt.train"
