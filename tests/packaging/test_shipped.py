"""What comes with cpt is found beside the package, or inside an installed one."""

import shutil

from cpt import installation


def test_in_a_clone_the_files_are_at_its_top():
    assert (installation.SHIPPED_FILES / "pyproject.toml").is_file() and (
        installation.SHIPPED_FILES / "recipes/demo.yaml"
    ).is_file()


def test_in_an_installed_package_the_files_are_inside(tmp_path, monkeypatch):
    package = tmp_path / "cpt"
    (package / "shipped").mkdir(parents=True)
    monkeypatch.setattr(installation, "__file__", str(shutil.copy(installation.__file__, package)))
    assert installation.find_shipped_files() == package / "shipped"


def test_the_program_behind_a_launcher_is_the_file_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(installation.SHIPPED_FILES)
    assert installation.training_program() == "cpt/train.py"
    monkeypatch.chdir(tmp_path)
    assert installation.training_program() == "-m cpt.train"
