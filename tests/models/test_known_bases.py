from cpt.models.known_bases import BASES, known_base


def test_a_base_is_found_by_its_id_in_any_case_and_by_the_name_of_its_folder():
    base = known_base("meta-llama/llama-2-7b-HF")
    assert base is not None and base is known_base("/data/models/Llama-2-7b-hf")
    assert (base.peak_learning_rate, base.final_learning_rate, base.batch_tokens, base.sequence_length) == (
        3e-4,
        3e-5,
        4_194_304,
        4096,
    )
    assert known_base("runs/mine/final") is None


def test_every_entry_has_a_source_a_licence_and_figures_that_fit_together():
    assert len({base.name for base in BASES}) == len(BASES)
    for base in BASES:
        assert base.source and base.licence and base.name.count("/") == 1
        if base.final_learning_rate is not None:
            assert base.peak_learning_rate is not None and base.final_learning_rate < base.peak_learning_rate
