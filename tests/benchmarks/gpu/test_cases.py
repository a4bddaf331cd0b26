from benchmarks.gpu.cases import CASES, SYSTEMS, tiny
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta, count_model_parameters


def test_shapes_are_those_of_the_models_they_are_called_after():
    sizes = {
        name: count_model_parameters(build_on_meta(config_from(dict(CASES[name].config)))).total for name in "ABCEG"
    }
    assert sizes == {"A": 124_475_904, "B": 494_032_768, "C": 1_235_814_400, "E": 8_030_261_248, "G": 3_212_749_824}


def test_a_tiny_case_keeps_all_switches():
    for case in CASES.values():
        small = tiny(case)
        assert (small.training, small.optimizer, small.packed, small.lora) == (
            case.training,
            case.optimizer,
            case.packed,
            case.lora,
        )
        assert set(case.systems) <= set(SYSTEMS) and case.config["model_type"] == small.config["model_type"]
