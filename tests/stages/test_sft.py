"""SFT is the loop of continued pre-training on other rows."""

from cpt.stages import cpt, sft


def test_it_differs_in_its_columns_alone():
    assert sft.build_trainer is cpt.build_trainer and sft.CONFIG is cpt.CONFIG and sft.COLUMNS == ("messages",)
