import re

import pytest
from tiny import TINY_LLAMA
from tiny_checkpoints import save_llama
from tiny_extended import write_model
from transformers import AutoTokenizer

from cpt.planning.gate import check_reality
from cpt.recipe.schema import Recipe


def mistakes(recipe: Recipe) -> list[str]:
    return [f"{type(mistake).__name__}: {mistake}" for mistake in check_reality(recipe).mistakes]


def test_packing_is_refused_where_documents_would_leak(load, tiny_recipe):
    shape = {
        "model_type": "mamba2",
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
    }
    model = {"from_scratch": True, "config": shape, "attention": "eager"}
    assert any("`data.packing`: mamba2" in line and "`packing: none`" in line for line in mistakes(load(model=model)))
    assert mistakes(load(model=model, data={**tiny_recipe["data"], "packing": "none"})) == []
    budget = {
        "data": {**tiny_recipe["data"], "packing": "token_budget"},
        "training": {"per_device_train_batch_size": 1},
    }
    assert mistakes(load(model=model, **budget)) == []


@pytest.mark.parametrize(
    ("model", "data", "mistake"),
    [
        ({"config": {**TINY_LLAMA, "attention_dropout": 0.1}}, {}, "varlen: it has no dropout"),
        ({"config": TINY_LLAMA}, {"packing": "token_budget"}, "varlen is for rows without a mask"),
        ({"config": {"model_type": "opt", "vocab_size": 320}}, {"packing": "none"}, "opt has not been tried with it"),
    ],
)
def test_varlen_is_refused_where_it_would_do_nothing_or_not_be_right(load, tiny_recipe, model, data, mistake):
    recipe = load(
        model={"from_scratch": True, "attention": "varlen", **model},
        data={**tiny_recipe["data"], **data},
        training={"per_device_train_batch_size": 1},
    )
    assert any(re.search(mistake, line) for line in mistakes(recipe))


@pytest.mark.parametrize("wish", [{"chat": "messages"}, {"fill_in_the_middle": {}}])
def test_a_tokenizer_without_what_a_source_asks_for_is_told(
    load, tiny_recipe, corpus, tokenizer_folder, tmp_path, wish
):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    data = {**tiny_recipe["data"], "sources": [{"path": str(corpus / "domain.jsonl"), **wish}]}
    said = [
        line
        for line in mistakes(load(data=data, tokenizer={"path": str(tmp_path / "plain")}))
        if f"`data.sources[0].{next(iter(wish))}`: the tokenizer" in line
    ]
    assert len(said) == 1


def test_rows_longer_than_the_learned_positions_are_refused(load):
    shape = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    assert any(
        "`data.sequence_length` is 64, but the model has learned 32 positions" in m
        for m in mistakes(load(model={"from_scratch": True, "config": shape}))
    )


def test_the_hub_is_unchecked_when_it_cannot_be_asked(load, tokenizer_folder):
    found = check_reality(load(stage="cpt", model={"path": "Qwen/Qwen3-0.6B"}, tokenizer={"path": "Qwen/Qwen3-0.6B"}))
    assert found.mistakes == []
    assert found.unchecked == ["`model.path`: Qwen/Qwen3-0.6B (Hub)", "`tokenizer.path`: Qwen/Qwen3-0.6B (Hub)"]


def test_a_hub_model_is_judged_by_the_shape_in_the_recipe(load):
    model = {"path": "some/model", "config": {**TINY_LLAMA, "vocab_size": 300}}
    assert any(
        "has 320 tokens, the model's vocabulary 300" in line for line in mistakes(load(stage="cpt", model=model))
    )


def test_a_model_without_a_record_of_new_rows_cannot_train_them_alone(load, tmp_path, tokenizer_folder):
    model = write_model(tmp_path / "model", tokenizer_folder, tied=True)
    (said,) = mistakes(load(stage="cpt", model={"path": str(model), "train_only": "new_rows"}))
    assert "`model.train_only`" in said and "cpt tokenizer extend MODEL" in said


def test_a_teacher_is_looked_at_before_the_run(load, tokenizer_folder, tmp_path):
    def with_teacher(path):
        return load(
            stage="distill_text", training={"per_device_train_batch_size": 2, "teacher_model_name_or_path": str(path)}
        )

    assert mistakes(with_teacher(save_llama(tmp_path / "fits", tokenizer_folder, 1, hidden_size=48))) == []
    (other,) = mistakes(with_teacher(save_llama(tmp_path / "other", tokenizer_folder, 1, vocab_size=384)))
    assert "`training.teacher_model_name_or_path`: " in other and "other has 384 tokens and the model 320" in other
    (gone,) = mistakes(with_teacher("./gone"))
    assert "`training.teacher_model_name_or_path`: ./gone does not exist" in gone
    assert check_reality(with_teacher(tmp_path / "runs" / "big")).mistakes == [], "another run is still to make it"


def test_a_reward_model_needs_an_architecture_with_a_classifier(load, tmp_path, tokenizer_folder):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    kind = {"stage": "reward", "data": {"sequence_length": 64, "sources": [{"path": str(rows)}]}}
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    models = [
        {"from_scratch": True, "config": {"model_type": name, "vocab_size": 320, **shape}}
        for name in ("minimind3", "llama")
    ]
    (told,), without = (mistakes(load(model=model, **kind)) for model in models)
    assert "`stage` reward: no sequence classifier for `minimind3`" in told and without == []
