"""The model, the tokenizer and the first examples of a recipe: they exist and fit each other."""

import pytest
from huggingface_hub.errors import GatedRepoError
from tiny import TINY_LLAMA, tiny_config
from tiny_checkpoints import save_llama
from tiny_extended import write_model
from tiny_tasks import TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cpt.cache import TOKENIZER, WEIGHTS
from cpt.errors import RecipeError, ResourceError
from cpt.models.adapters import add_lora
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta
from cpt.planning import check_model
from cpt.planning.check_model import (
    check_first_examples,
    check_new_rows,
    find_config,
    first_document,
    is_there,
    refuse_unreachable_model,
)
from cpt.planning.check_resources import PreflightReport
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import DocumentSource, Model, Recipe


def mistakes(recipe: Recipe) -> list[str]:
    return [f"{type(mistake).__name__}: {mistake}" for mistake in check_reality(recipe).mistakes]


def test_packing_is_refused_where_documents_would_leak(load, tiny_recipe):
    shape = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1}
    mamba = {"model_type": "mamba2", **shape, "num_heads": 4, "head_dim": 16, "state_size": 8}
    model = {"from_scratch": True, "config": mamba, "attention": "eager"}
    assert any("`data.packing`: mamba2" in line for line in mistakes(load(model=model)))
    for packing in ("none", "token_budget"):
        data = {**tiny_recipe["data"], "packing": packing}
        assert (
            mistakes(load(model=model, data=data, training={"per_device_train_batch_size": 1}))
            == []
        )


@pytest.mark.parametrize(
    ("config", "packing", "mistake"),
    [
        ({**TINY_LLAMA, "attention_dropout": 0.1}, "best_fit", "dropout is not supported"),
        (TINY_LLAMA, "token_budget", "rows without a mask"),
        ({"model_type": "opt", "vocab_size": 320}, "none", "opt is not tested with it"),
    ],
)
def test_varlen_is_refused_where_it_would_do_nothing_or_be_wrong(
    load, tiny_recipe, config, packing, mistake
):
    recipe = load(
        model={"from_scratch": True, "attention": "varlen", "config": config},
        data={**tiny_recipe["data"], "packing": packing},
        training={"per_device_train_batch_size": 1},
    )
    assert any(mistake in line for line in mistakes(recipe))


@pytest.mark.parametrize("option", [{"chat": "messages"}, {"fill_in_the_middle": {}}])
def test_a_tokenizer_without_what_a_source_needs_is_a_mistake(
    load, tiny_recipe, tokenizer_folder, tmp_path, option
):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    sources = [{"path": tiny_recipe["data"]["sources"][0]["path"], **option}]
    found = mistakes(
        load(
            data={**tiny_recipe["data"], "sources": sources},
            tokenizer={"path": str(tmp_path / "plain")},
        )
    )
    assert sum(f"`data.sources[0].{next(iter(option))}`" in line for line in found) == 1


def test_rows_longer_than_the_learned_positions_are_a_mistake(load):
    shape = {
        "model_type": "gpt2",
        "vocab_size": 320,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
    }
    found = mistakes(load(model={"from_scratch": True, "config": shape}))
    assert any("`data.sequence_length` is 64" in line for line in found)


def test_the_hub_is_unchecked_when_it_cannot_be_reached(load):
    found = check_reality(
        load(stage="cpt", model={"path": "Qwen/Qwen3-0.6B"}, tokenizer={"path": "Qwen/Qwen3-0.6B"})
    )
    assert found.mistakes == []
    assert [line.partition(":")[0] for line in found.unchecked] == [
        "`model.path`",
        "`tokenizer.path`",
    ]


@pytest.mark.parametrize("shape", [{}, {"config": TINY_LLAMA}])
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_model_of_the_hub_that_is_gated_is_a_mistake_and_one_that_fails_is_unchecked(
    load, monkeypatch, is_gated, shape
):
    def fail(model):
        cause = GatedRepoError.__new__(GatedRepoError) if is_gated else ConnectionError()
        raise ResourceError("from the Hub") from cause

    monkeypatch.setattr(check_model, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(check_model, "load_config", fail)
    recipe, found = load(stage="cpt", model={"path": "a/b", **shape}), PreflightReport()
    if is_gated:
        with pytest.raises(ResourceError, match="from the Hub"):
            find_config(recipe, found)
        return
    config = find_config(recipe, found)
    assert (config and config.model_type) == (shape and "llama" or None)
    (unchecked,) = found.unchecked
    assert unchecked.startswith("`model.path`: a/b (Hub)")
    assert ("the shape of `model.config`" in unchecked) is bool(shape)


@pytest.mark.parametrize(
    ("sections", "asked"),
    [
        ({"model": {"path": "a/b", "revision": "v1"}}, [("`model.path`", "a/b", "v1", WEIGHTS)]),
        (
            {
                "stage": "pretrain",
                "model": {"path": "a/b", "from_scratch": True},
                "tokenizer": {"path": "c/d", "revision": "v3"},
            },
            [
                ("`model.path`", "a/b", None, ("config.json",)),
                ("`tokenizer.path`", "c/d", "v3", TOKENIZER),
            ],
        ),
        ({"model": {"path": "./a"}}, []),
    ],
)
def test_what_a_run_needs_of_the_hub_is_asked_for(load, monkeypatch, sections, asked):
    calls = []
    monkeypatch.setattr(check_model, "refuse_unreachable", lambda *words: calls.append(words))
    refuse_unreachable_model(load(**{"stage": "cpt", **sections}))
    assert calls == asked


@pytest.mark.parametrize("trusts", [True, False])
def test_a_model_that_is_no_language_model_is_a_mistake_unless_it_brings_its_code(
    load, monkeypatch, trusts
):
    config = AutoConfig.for_model("t5")
    monkeypatch.setattr(check_model, "find_config", lambda *_: config)
    section = {"path": "./a", "trust_remote_code": trusts, "revision": "0" * 40}
    recipe = load(stage="cpt", model=section)
    found = PreflightReport()
    assert check_model.check_model(recipe, found) is None
    mistakes_found = [str(mistake) for mistake in found.mistakes]
    if trusts:
        assert mistakes_found == []
        assert found.unchecked == ["`model.trust_remote_code`: the code of ./a"]
    else:
        (mistake,) = mistakes_found
        assert "t5 is not a causal language model" in mistake and found.unchecked == []
    monkeypatch.setattr(check_model, "find_config", lambda *_: None)
    assert check_model.check_model(recipe, PreflightReport()) is None


def test_a_model_without_a_record_of_new_rows_cannot_train_them_alone(
    load, tmp_path, tokenizer_folder
):
    model = write_model(tmp_path / "model", tokenizer_folder, tied=True)
    (mistake,) = mistakes(load(stage="cpt", model={"path": str(model), "train_only": "new_rows"}))
    assert "`model.train_only`" in mistake


BOTH = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("section", "tied", "frozen"),
    [
        ({}, False, None),
        ({"train_only": "new_rows"}, False, None),
        ({"train_only": BOTH}, False, None),
        ({"train_only": ["lm_head"]}, False, "the embedding is frozen"),
        ({"train_only": ["layers.0"]}, False, "the embedding and the head are frozen"),
        ({"train_only": ["embed_tokens"]}, True, None),
        ({"lora": {}}, False, "the embedding and the head are frozen"),
        ({"lora": "cpt"}, False, None),
        ({"lora": "cpt"}, True, None),
        ({"lora": {"modules_to_save": ["lm_head"]}}, False, "the embedding is frozen"),
        ({"lora": {"target_modules": ["q_proj", "embed_tokens"]}}, False, "the head is frozen"),
        ({"lora": {"target_modules": ["embed_tokens"], "modules_to_save": BOTH}}, False, None),
        ({"lora": {"target_modules": ".*proj"}}, False, "the embedding and the head are frozen"),
        ({"lora": {"trainable_token_indices": [1, 2]}}, False, None),
        ({"lora": {}, "from_scratch": True}, False, None),
    ],
)
def test_rows_of_new_tokens_are_never_frozen(tmp_path, section, tied, frozen):
    model = build_on_meta(config_from({**TINY_LLAMA, "tie_word_embeddings": tied}))
    with_config = {"config": TINY_LLAMA} if section.get("from_scratch") else {"path": str(tmp_path)}
    written = Model.model_validate({**with_config, **section})
    for needed in (321, 320):
        if frozen is None or needed == 320:
            check_new_rows(written, model, needed)
        else:
            with pytest.raises(RecipeError, match=f"1 tokens .*: {frozen}"):
                check_new_rows(written, model, needed)


def test_new_rows_that_adapters_freeze_are_a_mistake(load, tmp_path, tokenizer_folder):
    model = str(write_model(tmp_path / "model", tokenizer_folder, tied=False, rows=300))
    section = {"path": model, "resize_embeddings": True}
    assert mistakes(load(stage="cpt", model=section)) == []
    (mistake,) = mistakes(load(stage="cpt", model={**section, "lora": {"r": 2}}))
    assert "20 tokens" in mistake
    (mistake,) = mistakes(load(stage="cpt", model={"path": model}))
    assert "ids up to 319, the model's vocabulary 300 rows" in mistake


@pytest.mark.parametrize(
    ("model_type", "bos", "from_scratch", "is_warned"),
    [
        ("llama", "<s>", False, True),
        ("mistral", "<s>", False, True),
        ("llama", "<s>", True, False),
        ("qwen3", "<s>", False, False),
        ("llama", "<other>", False, False),
    ],
)
def test_a_tokenizer_that_puts_no_bos_before_texts_of_a_family_that_expects_it(
    load, tmp_path, tokenizer_folder, model_type, bos, from_scratch, is_warned
):
    config = {**TINY_LLAMA, "model_type": model_type, "vocab_size": 330}
    AutoModelForCausalLM.from_config(config_from(config)).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.bos_token = bos
    tokenizer.save_pretrained(tmp_path)
    model = {"from_scratch": True, "config": config} if from_scratch else {"path": str(tmp_path)}
    stage = "pretrain" if from_scratch else "cpt"
    recipe = load(stage=stage, model=model, tokenizer={"path": str(tmp_path)})
    warnings = [line for line in check_reality(recipe).warnings if "does not put" in line]
    assert [f"{bos} before a text, as {model_type}" in line for line in warnings] == (
        [True] if is_warned else []
    )


def test_the_parts_that_are_trained_have_to_exist_and_a_tied_head_is_reported(load, tiny_recipe):
    def found_with(*parts, tied=False, **optimizer):
        config = {**TINY_LLAMA, "tie_word_embeddings": tied}
        model = {"from_scratch": True, "config": config, "train_only": list(parts)}
        return check_reality(load(model=model, optimizer={"learning_rate": 1e-4, **optimizer}))

    (mistake,) = found_with("layer.1").mistakes
    assert "`model.train_only`" in str(mistake) and "`layers`" in str(mistake)
    assert not found_with("layers.1").mistakes
    (mistake,) = found_with("layers.1", embedding_learning_rate=1e-5).mistakes
    assert "`optimizer.embedding_learning_rate`" in str(mistake)
    (warning,) = [
        line for line in found_with("lm_head", tied=True).warnings if "train_only" in line
    ]
    assert "embed_tokens" in warning


def test_a_learning_rate_for_embeddings_that_adapters_do_not_train_is_a_mistake(load):
    both = load(optimizer={"learning_rate": 1e-4, "embedding_learning_rate": 1e-5})

    def mistakes_with(**lora) -> list[str]:
        return mistakes(
            both.model_copy(update={"model": both.model.model_copy(update={"lora": lora})})
        )

    assert "`optimizer.embedding_learning_rate`" in mistakes_with()[0]
    assert (
        mistakes_with(preset="cpt")
        == mistakes_with(target_modules=["embed_tokens", "q_proj"])
        == []
    )


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapters_that_read_weights_of_fused_experts_are_refused_as_by_a_run(load, start):
    config = tiny_config("qwen3_moe", vocab_size=320)
    lora = {"r": 4, "init_lora_weights": start}
    with pytest.raises(RecipeError) as refused:
        add_lora(AutoModelForCausalLM.from_config(config_from(config)), lora)
    recipe = load(model={"from_scratch": True, "config": config})
    assert mistakes(recipe) == []
    adapted = recipe.model.model_copy(update={"lora": lora})
    assert mistakes(recipe.model_copy(update={"model": adapted})) == [
        f"RecipeError: {refused.value}"
    ]


def test_a_teacher_has_to_exist_unless_another_run_makes_it(load, tokenizer_folder, tmp_path):
    def found_with(teacher):
        training = {"per_device_train_batch_size": 2, "teacher_model_name_or_path": str(teacher)}
        return mistakes(load(stage="distill_text", training=training))

    assert found_with(save_llama(tmp_path / "fits", tokenizer_folder, 1, hidden_size=48)) == []
    assert found_with(tmp_path / "runs" / "big") == []
    for wrong in ("./gone", save_llama(tmp_path / "other", tokenizer_folder, 1, vocab_size=384)):
        (mistake,) = found_with(wrong)
        assert "`training.teacher_model_name_or_path`" in mistake


@pytest.mark.parametrize("reaches_hub", [True, False])
def test_another_model_of_the_hub_is_unchecked_when_the_hub_cannot_be_reached(
    monkeypatch, reaches_hub
):
    monkeypatch.setattr(check_model, "hub_is_reachable", lambda: reaches_hub)
    monkeypatch.setattr(check_model, "read_config", lambda section: config_from(TINY_LLAMA))
    report = PreflightReport()
    assert is_there("a/b", "v1", "rewards[1].path", report) is reaches_hub
    assert report.unchecked == ([] if reaches_hub else ["`rewards[1].path`: a/b (Hub)"])
    assert report.mistakes == []


def test_the_first_row_of_a_file_decides_and_a_bad_one_is_no_document(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "first"}\n{"text": "second"}\n')
    source = DocumentSource(path=str(path))
    assert first_document(source, "data.sources[0]").text == "first"
    path.write_text('{"words": "no column"}\n{"text": "second"}\n')
    assert first_document(source, "data.sources[0]") is None


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


def mistakes_in_examples(stage, *overrides, template=True):
    found = PreflightReport()
    tokenizer = AutoTokenizer.from_pretrained(TINY / "tokenizer")
    if not template:
        tokenizer.chat_template = None
    check_first_examples(load_recipe(TINY / f"{stage}.yaml", overrides), tokenizer, found)
    return " ".join(str(mistake) for mistake in found.mistakes)


def test_messages_need_a_chat_template():
    assert "`tokenizer.path`" in mistakes_in_examples("dpo", template=False)
    assert mistakes_in_examples("dpo") == mistakes_in_examples("kto") == ""
    assert mistakes_in_examples("grpo", template=False) == ""  # its prompts are plain texts


def test_a_column_that_a_reward_reads_has_to_exist():
    mistake = mistakes_in_examples("grpo", "rewards=[{name: exact_match, column: solution}]")
    assert "`rewards[0]`" in mistake and "`solution`" in mistake
