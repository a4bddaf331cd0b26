import pytest

from cpt.errors import RecipeError
from cpt.stages.build import TRAINERS, trainer_class
from cpt.training.arguments import find_stage
from cpt.training.trainer import CPTTrainer


@pytest.mark.parametrize("name", TRAINERS)
def test_each_built_in_stage_has_all_its_parts(name):
    stage = find_stage(name)
    assert stage.CONFIG and stage.COLUMNS and issubclass(trainer_class(name), CPTTrainer)


def test_a_misspelt_stage_names_the_nearest():
    with pytest.raises(RecipeError, match="Did you mean `pretrain`"):
        find_stage("pretrian")


def test_a_users_stage_is_a_module_with_three_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_stages").mkdir()
    (tmp_path / "my_stages" / "half.py").write_text("CONFIG = COLUMNS = ()\n")
    with pytest.raises(RecipeError, match="lacks build_trainer"):
        find_stage("my_stages.half")
