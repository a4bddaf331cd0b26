import pytest
import torch
from tiny_models import SHAPE, make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from cpt.errors import RecipeError
from cpt.recipe.schema import Reward
from cpt.stages.rewards import build_rewards, load_reward_model, reward_model


def save_judge(folder, num_labels=1):
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, intermediate_size=48, num_labels=num_labels, pad_token_id=2)
    model = LlamaForSequenceClassification(config).eval()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def test_scores_are_the_models_own_whatever_the_batch(tmp_path):
    model, tokenizer = save_judge(tmp_path / "judge")
    prompts, said = ["w3 w4 ", "w5 ", "w6 "], ["w7", "w8 w9 w10", "w11"]
    with torch.no_grad():
        texts = [
            tokenizer(a + b, return_tensors="pt", add_special_tokens=False) for a, b in zip(prompts, said, strict=True)
        ]
        expected = [model(**text).logits[0, 0].item() for text in texts]
    for size in (1, 2, 8):
        assert reward_model(prompts, said, path=str(tmp_path / "judge"), batch_size=size) == pytest.approx(
            expected, abs=1e-5
        )


def test_messages_go_through_its_own_template_and_a_run_stands_for_its_export(tmp_path):
    save_judge(tmp_path / "rm" / "final")
    prompt, said = [{"role": "user", "content": "w3"}], [{"role": "assistant", "content": "w4"}]
    (found,) = reward_model([prompt], [said], path=str(tmp_path / "rm"))
    assert reward_model(["w3 "], ["w4"], path=str(tmp_path / "rm")) == pytest.approx([found], abs=1e-6)
    assert not any(parameter.requires_grad for parameter in load_reward_model(str(tmp_path / "rm"))[0].parameters())


def test_what_is_no_judge_is_refused_before_the_run(tmp_path):
    with pytest.raises(RecipeError, match="cannot be loaded"):
        build_rewards([Reward(name="reward_model", path=str(tmp_path / "nothing"))], [])
    save_judge(tmp_path / "two", num_labels=2)
    with pytest.raises(RecipeError, match="gives 2 numbers"):
        build_rewards([Reward(name="reward_model", path=str(tmp_path / "two"))], [])
