from cpt.models.known_bases import known_base


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
