from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_process_group import alone_in_a_group
from safetensors.torch import load_file, save_file
from threads_as_ranks import on_ranks
from tiny import SHAPE, tiny_config
from tiny_models import make_tokenizer, tiny_model
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
)

from cpt.errors import CheckpointError, RecipeError
from cpt.models import build
from cpt.models.build import build_model, converted_weights, scoring_model
from cpt.models.config import config_from
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path


def load(folder: Path, num_tokens: int = 96, **section):
    return build_model(
        Model(path=str(folder), **section), make_tokenizer(num_tokens), seed=4
    ).eval()


def test_a_seed_decides_the_weights_and_leaves_the_runs_random_numbers_alone():
    torch.manual_seed(0)
    first = tiny_model("llama")
    drawn = torch.rand(3)
    same, other = tiny_model("llama"), tiny_model("llama", seed=2)
    assert torch.equal(first(IDS).logits, same(IDS).logits)
    assert not torch.equal(first(IDS).logits, other(IDS).logits)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), drawn)


def test_auto_dtype_is_the_runs_and_an_explicit_one_wins():
    section = Model(from_scratch=True, config=tiny_config("llama"))
    assert build_model(section, make_tokenizer(), dtype=torch.bfloat16).dtype == torch.bfloat16
    rounded = tiny_model("llama", dtype="bfloat16").model.embed_tokens.weight
    assert torch.equal(rounded, tiny_model("llama").model.embed_tokens.weight.bfloat16())


def test_a_model_from_scratch_takes_the_special_tokens_of_its_tokenizer():
    model = tiny_model(tiny_config("gpt2", eos_token_id=50))
    assert (
        model.config.bos_token_id,
        model.config.eos_token_id,
        model.generation_config.eos_token_id,
    ) == (1, 2, 2)


def test_the_vocabulary_grows_to_a_multiple_of_64_and_old_tokens_keep_their_logits(folder):
    grown, again = (load(folder, 130, resize_embeddings=True) for _ in range(2))
    assert grown.config.vocab_size == 192 == grown.lm_head.weight.shape[0]
    assert torch.equal(grown(IDS).logits[..., :96], tiny_model("llama").eval()(IDS).logits)
    assert torch.equal(again.model.embed_tokens.weight, grown.model.embed_tokens.weight)


def test_the_number_of_parameters_must_agree_before_the_vocabulary_grows():
    tiny_model("llama", parameters=21664, resize_embeddings=True, lora={}, num_tokens=130)
    with pytest.raises(RecipeError, match=r"model\.parameters"):
        tiny_model("llama", parameters=21665)


def test_a_cut_off_shard_is_a_checkpoint_error(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.path"):
        load(folder)


def test_tensors_that_are_absent_are_named_and_never_drawn_at_random(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight"):
        load(tmp_path)


@pytest.mark.parametrize("lora", [None, {}])
def test_a_native_mixture_has_its_balance_loss_in_training_only(lora):
    model = tiny_model("qwen3_moe", lora=lora)
    trained, evaluated = (
        model.train()(input_ids=IDS, labels=IDS),
        model.eval()(input_ids=IDS, labels=IDS),
    )
    assert evaluated.aux_loss is None
    torch.testing.assert_close(trained.loss, evaluated.loss + 0.001 * trained.aux_loss)


def test_the_language_model_of_weights_that_also_read_images_is_trained_alone(tmp_path):
    text = {"model_type": "gemma3_text", **SHAPE, "intermediate_size": 48, "head_dim": 8}
    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = tower | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    alone = load(tmp_path, config=text)
    assert type(alone) is Gemma3ForCausalLM
    assert torch.equal(alone(input_ids=IDS).logits, whole(input_ids=IDS).logits)
    alone.save_pretrained(tmp_path / "alone")
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "alone/model.safetensors")
    with pytest.raises(RecipeError, match="hidden_size: 64 in model.config"):
        load(tmp_path, config=text | {"hidden_size": 64})


def test_tensors_that_belong_nowhere_are_named_in_a_warning(tmp_path, caplog):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    others = {f"other.{number}": torch.zeros(2) for number in range(7)}
    save_file(tensors | others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
    (message,) = [record.getMessage() for record in caplog.records if "7 tensors" in record.message]
    assert message.endswith("model: other.0, other.1, other.2, other.3, other.4")


@pytest.mark.parametrize(
    ("family", "attention", "logged"),
    [
        ("llama", "auto", "attention: sdpa (auto: "),
        ("llama", "eager", "attention: eager"),
        ("mamba2", "auto", None),
    ],
)
def test_the_attention_is_logged_where_there_is_one(caplog, family, attention, logged):
    config = {"model_type": "mamba2", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_heads": 4, "head_dim": 16, "state_size": 8}
    caplog.set_level("INFO", "cpt")
    tiny_model(config if family == "mamba2" else family, attention=attention)
    lines = [line for line in caplog.messages if line.startswith("attention")]
    assert [line.startswith(logged) for line in lines] == ([True] if logged else [])


@pytest.mark.parametrize(
    ("attention", "packed", "expected"),
    [
        ("auto", True, None),
        ("sdpa", True, "sdpa"),
        ("varlen", False, "varlen"),
        ("flash_attention_2", False, "flash_attention_2"),
        ("varlen", True, RecipeError),
        ("flash_attention_2", True, RecipeError),
    ],
)
def test_a_models_own_code_gets_the_attention_of_the_recipe_if_documents_stay_apart(
    attention, packed, expected
):
    class OwnConfig(LlamaForCausalLM.config_class):
        model_type = "own"

    section = Model(path="a/b", attention=attention)
    options = {"half_precision": True, "packed": packed}
    if expected is RecipeError:
        with pytest.raises(RecipeError, match=f"model.attention: {attention}"):
            build._attention(section, OwnConfig(), **options)
    else:
        assert build._attention(section, OwnConfig(), **options) == expected


def test_weights_in_the_shape_of_the_recipe_are_not_converted(folder):
    llama = config_from(tiny_config("llama"))
    with_config = Model(path=str(folder), config=tiny_config("llama"))
    for section, config in (
        (Model(path=str(folder)), llama),
        (with_config, llama),
        (with_config, AutoConfig.for_model("qwen3")),
    ):
        assert converted_weights(section, config, str(folder), "main") is None


class Separating(LlamaForCausalLM):
    keeps_documents_apart = True


class Leaking(Separating):
    def forward(self, *arguments, position_ids=None, **options):
        return super().forward(*arguments, **options)


@pytest.mark.parametrize("model_class", [Separating, Leaking])
@pytest.mark.parametrize("packed", [True, False])
def test_a_class_that_claims_to_keep_packed_documents_apart_is_tried(
    monkeypatch, model_class, packed
):
    config = config_from(tiny_config("llama", vocab_size=128))
    monkeypatch.setattr(
        "cpt.models.build.AutoModelForCausalLM.from_config",
        lambda config, **_: model_class(config),
    )
    section = Model(from_scratch=True, config=tiny_config("llama", vocab_size=128))
    if packed and model_class is Leaking:
        with pytest.raises(RecipeError, match="Leaking sets `keeps_documents_apart`"):
            build_model(section, make_tokenizer(), packed=packed)
    else:
        built = build_model(section, make_tokenizer(), packed=packed)
        assert type(built) is model_class and built.config.vocab_size == config.vocab_size


def test_a_tied_head_that_is_trained_as_the_embedding_is_reported(caplog):
    config = tiny_config("llama", tie_word_embeddings=True)
    caplog.set_level("INFO", "cpt")
    tiny_model(config, train_only=["lm_head", "layers.1.mlp"])
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "embed_tokens" in warning.getMessage()
    assert "model.train_only: 4 of 20 tensors are trained" in caplog.messages


def test_the_main_process_alone_reads_the_weights_that_fsdp2_divides(folder, monkeypatch):
    plain = load(folder)
    builds = []
    build_once = build.build_once
    monkeypatch.setattr(
        build, "build_once", lambda *arguments: builds.append(1) or build_once(*arguments)
    )
    with alone_in_a_group():
        again = build_model(
            Model(path=str(folder)), make_tokenizer(), seed=4, is_sharded_later=True
        )
    assert builds == [1]
    assert torch.equal(again.eval()(IDS).logits, plain(IDS).logits)
    assert again.generation_config.to_dict() == plain.generation_config.to_dict()

    # threads have one environment, which says which process they are
    monkeypatch.setattr(build, "is_main_process", lambda: dist.get_rank() == 0)
    monkeypatch.setattr(build, "main_process_first", lambda work: work())

    def load_on(rank):
        calls.append(rank)
        model = load(folder)
        for buffer in model.buffers():
            buffer.mul_(3)  # not those that its config gives
        return model

    def build_on(rank):
        made = build_once(partial(load_on, rank), False)
        return made, made.generation_config

    calls = []
    (main, _), (other, _) = on_ranks(2, build_on)
    assert calls == [0] and main is not other
    names = [name for name, _ in main.named_parameters()]
    assert names == [name for name, _ in other.named_parameters()]
    for (name, buffer), copied in zip(main.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, copied), name
    assert other.dtype == main.dtype and other.config.to_dict() == main.config.to_dict()


def test_more_than_five_absent_tensors_are_counted(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for number, (count, end) in enumerate([(5, r"[^.]\)"), (6, r", \.\.\.\)")]):
        kept = dict(sorted(tensors.items())[count:])
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"lacks {5 + number} of its tensors .*{end}"):
            load(tmp_path)


# --- scoring models --------------------------------------------------------------------------------------------------


def scoring(*, seed: int = 1, **section):
    return scoring_model(
        Model(from_scratch=True, config=tiny_config("llama"), **section),
        make_tokenizer(),
        seed=seed,
    )


def test_a_scoring_models_body_is_the_recipes_model_and_its_head_is_drawn_from_the_seed():
    first, again, other = scoring(), scoring(), scoring(seed=2)
    body = dict(first.model.named_parameters())
    assert all(
        torch.equal(value, body[name])
        for name, value in tiny_model("llama").model.named_parameters()
    )
    assert first.score.weight.shape == (1, 32)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)


def test_an_adapter_leaves_the_head_to_be_trained_whole():
    trained = [
        name for name, value in scoring(lora={"r": 2}).named_parameters() if value.requires_grad
    ]
    assert any("score" in name for name in trained) and all(
        "lora" in name or "score" in name for name in trained
    )
