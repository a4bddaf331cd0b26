from cpt.recipe.stage_columns import columns_of_stage
from cpt.stages.distill import CONFIG, build_trainer
from cpt.stages.find import find_stage


def test_it_is_distillation_on_documents():
    stage = find_stage("distill_text")
    assert (stage.CONFIG, stage.build_trainer) == (CONFIG, build_trainer)
    assert columns_of_stage("distill_text") == ("text",) and columns_of_stage("distill") == ("messages",)
