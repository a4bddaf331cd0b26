import json
import random
from types import SimpleNamespace

import pytest
import torch
from tiny import TINY_LLAMA
from tiny_tokenizers import llama3
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.cli import main
from cpt.errors import RecipeError
from cpt.evaluation.needle import DEPTHS, find_needles, needles_found, text_with_needle
from cpt.recipe.schema import Model


@pytest.fixture(scope="module")
def tokenizer():
    return llama3()


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = {**TINY_LLAMA, "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Remembers(nn.Module):
    """Says of each token what followed the last place where the same `reach` tokens stood: what a good model learns to
    do."""

    def __init__(self, reach: int, looks_back: int = 10**9) -> None:
        super().__init__()
        self.reach, self.looks_back = reach, looks_back
        self.anything = nn.Parameter(torch.zeros(1))

    @property
    def device(self) -> torch.device:
        return self.anything.device

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        ids = input_ids[0].tolist()
        logits = torch.zeros(1, len(ids), 1000)
        for at in range(self.reach - 1, len(ids)):
            last = ids[at - self.reach + 1 : at + 1]
            for before in range(at - 1, max(self.reach - 2, at - self.looks_back), -1):
                if ids[before - self.reach + 1 : before + 1] == last:
                    logits[0, at, ids[before + 1]] = 1
                    break
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_text_has_its_length_its_needle_at_its_depth_and_its_answer_at_the_end(tokenizer, depth):
    text = text_with_needle(tokenizer, 600, depth, random.Random(1))
    assert len(text.ids) == 600
    words = tokenizer.decode(text.ids)
    answer = tokenizer.decode(text.ids[-text.answer :]).strip()
    assert words.count(answer) == 2
    assert words.endswith(f"is {answer}")
    at = words.index("The pass key of") / len(words)
    assert depth * 0.6 <= at <= depth * 0.9 + 0.05


def test_who_remembers_finds_all_needles_and_who_looks_back_less_only_the_near_ones(tokenizer):
    found = {depth: needles_found(Remembers(8), tokenizer, 700, depth, trials=3, seed=0).found for depth in DEPTHS}
    assert found == dict.fromkeys(DEPTHS, 3)
    near = {
        depth: needles_found(Remembers(8, looks_back=250), tokenizer, 700, depth, trials=3, seed=0).found
        for depth in DEPTHS
    }
    assert (near[0.0], near[0.25], near[1.0]) == (0, 0, 3)


def test_lengths_that_cannot_be_are_refused(tokenizer, model):
    with pytest.raises(RecipeError, match="--needle 60: .* take"):
        text_with_needle(tokenizer, 60, 0.5, random.Random(1))
    with pytest.raises(RecipeError, match="positions"):
        find_needles(Model(path=str(model)), [10**7])


def test_the_command_shows_a_table_or_json(model, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(model), "--needle", "700"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"Needles that {model} found:" in shown
    assert shown.count("0 of 10") == len(DEPTHS)
    with pytest.raises(SystemExit):
        main(["evaluate", str(model), "--needle", "700", "--json"])
    (of_model,) = json.loads(capsys.readouterr().out)["needles"].values()
    assert [(one["tokens"], one["depth"], one["trials"]) for one in of_model] == [(700, depth, 10) for depth in DEPTHS]
    assert sum(one["found"] for one in of_model) == 0, "its weights are random"
