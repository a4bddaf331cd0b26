"""The model, the tokenizer and the first examples of a recipe: they exist and fit each other."""

import pytest
from tiny import TINY_LLAMA
from tiny_checkpoints import save_llama
from tiny_extended import write_model
from tiny_tasks import TINY
from transformers import AutoTokenizer

from cpt.planning.check_model import check_first_examples
from cpt.planning.check_resources import PreflightReport
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe


def mistakes(recipe: Recipe) -> list[str]:
    return [f"{type(mistake).__name__}: {mistake}" for mistake in check_reality(recipe).mistakes]


def test_packing_is_refused_where_documents_would_leak(load, tiny_recipe):
    shape = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1}
    mamba = {"model_type": "mamba2", **shape, "num_heads": 4, "head_dim": 16, "state_size": 8}
    model = {"from_scratch": True, "config": mamba, "attention": "eager"}
    assert any("`data.packing`: mamba2" in line for line in mistakes(load(model=model)))
    for packing in ("none", "token_budget"):
        data = {**tiny_recipe["data"], "packing": packing}
        assert mistakes(load(model=model, data=data, training={"per_device_train_batch_size": 1})) == []


@pytest.mark.parametrize(
    ("config", "packing", "mistake"),
    [
        ({**TINY_LLAMA, "attention_dropout": 0.1}, "best_fit", "no dropout"),
        (TINY_LLAMA, "token_budget", "rows without a mask"),
        ({"model_type": "opt", "vocab_size": 320}, "none", "opt has not been tried with it"),
    ],
)
def test_varlen_is_refused_where_it_would_do_nothing_or_be_wrong(load, tiny_recipe, config, packing, mistake):
    recipe = load(
        model={"from_scratch": True, "attention": "varlen", "config": config},
        data={**tiny_recipe["data"], "packing": packing},
        training={"per_device_train_batch_size": 1},
    )
    assert any(mistake in line for line in mistakes(recipe))


@pytest.mark.parametrize("option", [{"chat": "messages"}, {"fill_in_the_middle": {}}])
def test_a_tokenizer_without_what_a_source_needs_is_a_mistake(load, tiny_recipe, tokenizer_folder, tmp_path, option):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    sources = [{"path": tiny_recipe["data"]["sources"][0]["path"], **option}]
    found = mistakes(
        load(data={**tiny_recipe["data"], "sources": sources}, tokenizer={"path": str(tmp_path / "plain")})
    )
    assert sum(f"`data.sources[0].{next(iter(option))}`" in line for line in found) == 1


def test_rows_longer_than_the_learned_positions_are_a_mistake(load):
    shape = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    found = mistakes(load(model={"from_scratch": True, "config": shape}))
    assert any("`data.sequence_length` is 64" in line for line in found)


def test_the_hub_is_unchecked_when_it_cannot_be_reached(load):
    found = check_reality(load(stage="cpt", model={"path": "Qwen/Qwen3-0.6B"}, tokenizer={"path": "Qwen/Qwen3-0.6B"}))
    assert found.mistakes == []
    assert [line.partition(":")[0] for line in found.unchecked] == ["`model.path`", "`tokenizer.path`"]


def test_a_hub_model_is_checked_by_the_shape_in_the_recipe(load):
    model = {"path": "some/model", "config": {**TINY_LLAMA, "vocab_size": 300}}
    assert any("320 tokens" in line for line in mistakes(load(stage="cpt", model=model)))


def test_a_model_without_a_record_of_new_rows_cannot_train_them_alone(load, tmp_path, tokenizer_folder):
    model = write_model(tmp_path / "model", tokenizer_folder, tied=True)
    (mistake,) = mistakes(load(stage="cpt", model={"path": str(model), "train_only": "new_rows"}))
    assert "`model.train_only`" in mistake


def test_a_learning_rate_for_embeddings_that_adapters_do_not_train_is_a_mistake(load):
    both = load(optimizer={"learning_rate": 1e-4, "embedding_learning_rate": 1e-5})

    def mistakes_with(**lora) -> list[str]:
        return mistakes(both.model_copy(update={"model": both.model.model_copy(update={"lora": lora})}))

    assert "`optimizer.embedding_learning_rate`" in mistakes_with()[0]
    assert mistakes_with(preset="cpt") == mistakes_with(target_modules=["embed_tokens", "q_proj"]) == []


def test_a_teacher_has_to_exist_and_to_have_the_same_tokens(load, tokenizer_folder, tmp_path):
    def found_with(teacher):
        training = {"per_device_train_batch_size": 2, "teacher_model_name_or_path": str(teacher)}
        return mistakes(load(stage="distill_text", training=training))

    key = "`training.teacher_model_name_or_path`"
    assert found_with(save_llama(tmp_path / "fits", tokenizer_folder, 1, hidden_size=48)) == []
    (other,) = found_with(save_llama(tmp_path / "other", tokenizer_folder, 1, vocab_size=384))
    assert key in other and "384 tokens" in other
    (gone,) = found_with("./gone")
    assert key in gone
    assert found_with(tmp_path / "runs" / "big") == [], "another run still has to make it"


def test_a_reward_model_needs_an_architecture_with_a_classifier(load, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    data = {"sequence_length": 64, "sources": [{"path": str(rows)}]}

    def found_for(model_type):
        model = {"from_scratch": True, "config": {**TINY_LLAMA, "model_type": model_type}}
        return mistakes(load(stage="reward", data=data, model=model))

    (mistake,) = found_for("minimind3")
    assert "`stage` reward" in mistake and found_for("llama") == []


# --- the first example of each source -----------------------------------------------------------------------------


def mistakes_of(stage, *overrides, template=True):
    found = PreflightReport()
    tokenizer = AutoTokenizer.from_pretrained(TINY / "tokenizer")
    if not template:
        tokenizer.chat_template = None
    check_first_examples(load_recipe(TINY / f"{stage}.yaml", overrides), tokenizer, found)
    return [str(mistake) for mistake in found.mistakes]


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "grpo"])
def test_the_tiny_recipes_have_what_they_need(stage):
    assert mistakes_of(stage) == []


def test_messages_need_a_chat_template():
    (mistake,) = mistakes_of("dpo", template=False)
    assert "`tokenizer.path`" in mistake
    assert mistakes_of("grpo", template=False) == []  # its prompts are plain texts


def test_a_column_that_a_reward_reads_has_to_exist():
    (mistake,) = mistakes_of("grpo", "rewards=[{name: exact_match, column: solution}]")
    assert "`rewards[0]`" in mistake and "`solution`" in mistake and "answer" in mistake
