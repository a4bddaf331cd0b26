"""The choices of `cpt init`: rules about documents, bases and machines."""

import json
import math
from dataclasses import replace

import pytest
from tiny import write_documents, write_recipe
from tiny_checkpoints import save_llama
from transformers import AutoConfig, AutoTokenizer

from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError, ResourceError
from cpt.models.inventory import build_on_meta, count_model_parameters, longest_row
from cpt.models.known_bases import known_base
from cpt.planning import init_recipe
from cpt.planning.activations import count_activations
from cpt.planning.init_recipe import (
    BaseModel,
    RecipeChoices,
    TrainingMethod,
    choose,
    own_run,
    read_base,
    read_documents,
)
from cpt.planning.speed import find_target

FAR = {"bytes_per_token": 2.4, "compared_with_english": 0.6}
GPT2_LARGE = AutoConfig.for_model("gpt2", n_embd=1280, n_layer=36, n_head=20, n_positions=8192)
LLAMA_13B = AutoConfig.for_model(
    "llama", hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
)
COUNTS = {}
NO_LAYERS = AutoConfig.for_model("llama", num_hidden_layers=0)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def encoder(tokenizer):
    return DocumentEncoder(tokenizer)


@pytest.fixture(scope="session")
def documents(corpus, encoder):
    return read_documents(str(corpus / "domain.jsonl"), None, encoder)


def count_once(config, setup):
    name = f"{config}{setup}"
    COUNTS[name] = COUNTS.get(name) or count_activations(config, setup)
    return COUNTS[name]


@pytest.fixture
def choices(documents, tokenizer, monkeypatch):
    """What is chosen for a model without weights on a machine, with documents of which some facts are changed."""
    monkeypatch.setattr("cpt.planning.memory.count_activations", count_once)

    def of(config=GPT2_LARGE, gpu="RTX 4090", path="some/base", gpus=1, found=None, **options):
        changed = {"tokens": 10**8, "compared_with_english": 0.95, **(found or {})}
        model = build_on_meta(config)
        parameters = count_model_parameters(model).total
        base = BaseModel(
            path, model, tokenizer, parameters, longest_row(config), True, known_base(path)
        )
        return choose(replace(documents, **changed), base, find_target(gpu, gpus, 64.0), **options)

    return of


@pytest.mark.slow
def test_text_that_the_tokenizer_does_not_fit_is_a_strong_shift_unless_the_user_knows_better(
    choices,
):
    weak, strong = choices(), choices(found=FAR)
    assert (weak.replay, strong.replay) == (
        0.05,
        0.25,
    ) and strong.learning_rate > weak.learning_rate
    assert (
        choices(shift="strong").replay == 0.25 and choices(found=FAR, shift="weak").replay == 0.05
    )


@pytest.mark.slow
def test_few_tokens_are_read_more_often_but_never_more_than_four_times(choices):
    epochs = [choices(found={"tokens": tokens}).epochs for tokens in (10**7, 10**8, 10**9)]
    assert epochs == [4, 2, 1] and choices(tokens=10**7).tokens == 10**7


@pytest.mark.slow
def test_the_batch_is_divided_and_there_are_steps_enough(choices):
    for gpu, gpus in (("RTX 4090", 1), ("H100", 4), ("cpu", 1)):
        found = choices(gpu=gpu, gpus=gpus)
        assert found.batch_tokens % (found.way.micro_batch * found.sequence_length * gpus) == 0
        assert (
            found.tokens / found.batch_tokens >= 400 and found.warmup_tokens <= 0.03 * found.tokens
        )


@pytest.mark.slow
def test_a_known_base_continues_at_the_rate_it_ended_at(choices):
    known = choices(path="meta-llama/Llama-2-7b-hf")
    assert (
        known.learning_rate == 3e-5
        and "arXiv 2307.09288" in known.rate_reason
        and known.sequence_length == 4096
    )
    assert choices(path="meta-llama/Llama-3.1-8B").learning_rate == pytest.approx(
        3e-5
    )  # a tenth of its peak
    assert choices(path="meta-llama/Llama-2-7b-hf", found=FAR).learning_rate == pytest.approx(9e-5)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_trained_with_adapters_or_refused(choices):
    assert choices().way.name == "full" and choices().way.profile is None
    large = choices(LLAMA_13B, "A100-80GB")
    assert large.way.name == "lora" and large.way.refused[0].startswith("all parameters")
    with pytest.raises(ResourceError, match="RTX 4080"):
        choices(LLAMA_13B, "RTX 4080")


@pytest.mark.parametrize(
    ("tokens", "batch", "half_life"),
    [
        (10**10, 131_072, 7.1e6),
        (10**10, 32_768, 7.1e6),
        (10**7, 32_768, 1e6),
        (32_000, 512, None),
        (10**10, 2**20, None),
    ],
)
def test_the_second_moment_averages_over_tokens_but_never_over_fewer_steps_than_usual(
    tokens, batch, half_life
):
    way = TrainingMethod("full", None, 1, False, 1.0, 10**9, (1.0, 1.0, 1.0), [])
    beta2 = RecipeChoices(way, 4096, "", 0.05, 1, tokens, batch, 1e-5, "", batch, 0.1, 5).beta2
    assert (
        beta2 == 0.95
        if half_life is None
        else batch * math.log(0.5) / math.log(beta2) == pytest.approx(half_life, 0.02)
    )


def test_too_little_text_and_a_model_without_layers_for_adapters_are_refused(choices):
    with pytest.raises(DataError):
        choices(found={"tokens": 2000})
    with pytest.raises(ResourceError, match="--lora"):
        choices(NO_LAYERS, full=False)


def test_a_base_that_cpt_trained_has_its_runs_learning_rates_batch_and_rows(
    tmp_path, tiny_recipe, tokenizer_folder
):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    write_recipe(tiny_recipe, final.parent / "recipe.yaml")
    rows = [
        {"step": 1, "learning_rate": 1e-3},
        {"step": 2, "learning_rate": 1e-4},
        {"step": 2, "eval_loss": 3},
    ]
    (final.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = own_run(str(final))
    assert made is not None and (made.peak_learning_rate, made.final_learning_rate) == (3e-3, 1e-4)
    assert (made.batch_tokens, made.sequence_length) == (256, 64) and own_run("some/base") is None
    save_llama(final, tokenizer_folder, seed=1)
    base = read_base(str(final))
    assert (base.known, base.longest_row, base.packs_documents) == (made, 128, True)
    assert base.parameters == base.model.num_parameters() and len(base.tokenizer) == 320
    pythia = save_llama(tmp_path / "pythia-70m", tokenizer_folder, seed=1)
    assert read_base(str(pythia)).known == known_base("EleutherAI/pythia-70m")
    (final.parent / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 3}\n')
    assert own_run(str(final)).final_learning_rate is None
    assert own_run(str(final.parent)) is None
    (final.parent / "metrics.jsonl").unlink()
    assert own_run(str(final)) is None
    small = save_llama(tmp_path / "small", tokenizer_folder, seed=1, vocab_size=300)
    with pytest.raises(RecipeError, match="ids up to 319, but its embedding 300 rows"):
        read_base(str(small))


def test_of_many_documents_a_part_is_read_and_the_rest_is_estimated(tmp_path, encoder, monkeypatch):
    for number in range(8):
        write_documents(tmp_path / f"{number}.jsonl", 100, number)
    monkeypatch.setattr(init_recipe, "READ_BYTES", 60_000)
    facts = read_documents(str(tmp_path), None, encoder)
    assert not facts.is_whole and facts.documents_read < 800 and 700 < facts.documents < 900


def test_400_documents_from_everywhere_are_tokenized(tmp_path, encoder):
    texts = [f"document {number} about models" for number in range(1000)] + ["again"] * 3
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    facts = read_documents(str(path), None, encoder)
    assert (facts.documents_read, facts.documents, facts.repeats) == (1003, 1003, 2)
    assert facts.is_whole and facts.text_bytes == sum(map(len, texts))
    numbers = [texts.index(text) for text in facts.sample if text != "again"]
    assert len(facts.sample) == 400 and len({*numbers}) == len(numbers)
    quarters = [sum(number // 250 == quarter for number in numbers) for quarter in range(4)]
    assert min(quarters) > 70
    _, lengths = encoder.encode(facts.sample)
    each = sum(map(len, facts.sample)) / sum(lengths)
    assert facts.bytes_per_token == pytest.approx(each)
    assert facts.tokens == round(facts.text_bytes / each)


def test_the_column_of_the_text_is_found_by_its_usual_names(tmp_path, encoder):
    path = tmp_path / "rows.jsonl"
    row = {"title": "x", "markdown": "some words of text", "other": "words"}
    path.write_text((json.dumps(row) + "\n") * 60)
    assert read_documents(str(path), None, encoder).source.text_column == "markdown"
    assert read_documents(str(path), "other", encoder).source.text_column == "other"
    with pytest.raises(DataError, match="no column `missing`.*--text-column"):
        read_documents(str(path), "missing", encoder)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "DOCUMENTS"),
        ({"a.pdf": "x"}, "cpt data ingest"),
        ({"a.txt": "one book"}, "split long ones"),
        ({"a.jsonl": '{"text": "x"}\n' * 40}, "50 are needed"),
        ({"a.jsonl": '{"text": "x"}\n' * 60 + "broken\n" * 20}, "a.jsonl:61"),
    ],
)
def test_documents_that_no_run_could_use_are_refused(tmp_path, encoder, files, part):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=part):
        read_documents(str(tmp_path), None, encoder)


def test_documents_on_the_hub_are_refused(encoder):
    with pytest.raises(DataError):
        read_documents("owner/dataset", None, encoder)
