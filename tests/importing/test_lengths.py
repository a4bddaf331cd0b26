from imported_configs import result

from cpt.importing.lengths import Lengths, in_words, tokens_for


def test_steps_become_tokens(axolotl, loaded):
    ledger = axolotl(
        sequence_len=128, micro_batch_size=2, gradient_accumulation_steps=4, max_steps=10, num_epochs=3, gpus=2
    )
    recipe = loaded(ledger)
    assert recipe.budget.tokens == 10 * 128 * 2 * 4 * 2 and recipe.budget.epochs is None
    assert recipe.training == {**recipe.training, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    found = result(ledger)
    assert "10 steps on 2 GPUs" in found["max_steps"][1] and found["num_epochs"] == (
        "otherwise",
        "max_steps decides there too",
    )


def test_epochs_and_defaults(axolotl, llamafactory, loaded):
    ledger = llamafactory(max_steps=-1)
    recipe = loaded(ledger)
    assert (recipe.budget.epochs, recipe.data.sequence_length, recipe.training["per_device_train_batch_size"]) == (
        3,
        2048,
        8,
    )
    assert ledger.defaults == [
        "data.sequence_length: 2048",
        "training.per_device_train_batch_size: 8",
        "budget.epochs: 3",
    ]
    assert result(ledger)["max_steps"] == ("otherwise", "no limit there")
    assert loaded(axolotl(num_epochs=2)).budget.epochs == 2


def test_rows_of_a_whole_step_are_divided(axolotl):
    ledger = axolotl(batch_size=32, micro_batch_size=4, gpus=2)
    assert (
        ledger.recipe["training"]["gradient_accumulation_steps"] == 4
        and result(ledger)["batch_size"][0] == "otherwise"
    )


def test_a_share_needs_a_length():
    known, unknown = Lengths(100, 50, 1), Lengths(100, None, 2)
    assert tokens_for(5, unknown) == 500 and tokens_for(0.1, unknown) is None and tokens_for(0.1, known) == 500
    assert tokens_for(0.0001, known) == 100, "one step at least"
    assert in_words(1) == "1 GPU" and in_words(2) == "2 GPUs"
