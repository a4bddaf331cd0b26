from imported_configs import result

SETS = [{"path": "a/b", "type": "rewards.prompts"}]


def test_reward_functions_and_what_trl_takes(axolotl, loaded):
    trl = {
        "reward_funcs": ["rewards.right", "lab.rewards.short"],
        "reward_weights": [2],
        "beta": 0.1,
        "vllm_max_model_len": 9,
        "top_p": None,
        "scale_rewards": False,
        "odd": 1,
    }
    ledger = axolotl(rl="grpo", datasets=SETS, trl=trl)
    assert [(reward.name, reward.weight) for reward in loaded(ledger).rewards] == [
        ("rewards:right", 2.0),
        ("lab.rewards:short", 1.0),
    ]
    assert ledger.recipe["training"]["beta"] == 0.1 and ledger.recipe["training"]["vllm_max_model_length"] == 9
    assert ledger.recipe["training"]["scale_rewards"] == "none"
    found = result(ledger)
    assert (
        found["trl.top_p"] == ("carried", "empty there")
        and found["trl.odd"][0] == "not"
        and found["datasets[0].type"][0] == "not"
    )


def test_one_function_may_stand_alone(axolotl, loaded):
    ledger = axolotl(rl="grpo", datasets=SETS, trl={"reward_funcs": "lab.short", "reward_weights": 2})
    assert [(reward.name, reward.weight) for reward in loaded(ledger).rewards] == [("lab:short", 2.0)]


def test_without_a_reward_there_is_one_to_fill_in(axolotl, loaded):
    ledger = axolotl(rl="grpo", datasets=SETS)
    assert loaded(ledger).rewards[0].name == "exact_match" and "FILL IN" in ledger.comments["rewards"]


def test_other_stages_learn_from_no_rewards(axolotl):
    found = result(axolotl(trl={"reward_funcs": ["a.b"], "beta": 1}))
    assert found["trl.reward_funcs"] == ("not", "stage `cpt` learns from no rewards") and found["trl.beta"][0] == "not"
    assert result(axolotl(trl={}))["trl"] == ("carried", "empty there")
