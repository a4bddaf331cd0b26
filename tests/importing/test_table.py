from cpt.importing.table import table_of


def test_three_lists_with_every_key(axolotl):
    shown = table_of(
        axolotl(
            adapter=None,
            flash_attention=True,
            wandb_entity="me",
            load_in_8bit=False,
            overrides_of_model_config={"rope_theta": 5},
        )
    )
    carried, otherwise, dropped, defaults = shown.split("\n\n")
    assert (
        carried.startswith("Carried over (")
        and "  base_model        model.path" in carried
        and "  empty there: adapter" in carried
    )
    assert "off there, as here: load_in_8bit" in carried
    assert otherwise.startswith("Carried over otherwise (2)") and "rope_theta\n      " in otherwise, (
        "a long key has a line of its own"
    )
    assert dropped == "Not carried over (1)\n  wandb_entity  set it in the environment: WANDB_ENTITY"
    assert "data.sequence_length: 512" in defaults and all(len(line) <= 120 for line in shown.splitlines())
