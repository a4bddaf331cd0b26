"""Models: every family trains and exports to what plain transformers loads; adapters, new tokens and mixtures of
models too."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from causal_families import small_values
from peft import LoraConfig, PeftModel, get_peft_model
from promises.conftest import trainer_of
from safetensors.torch import load_file
from tiny import TINY, TINY_LLAMA, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from cpt import build_model, export_model, load_recipe
from cpt.errors import RecipeError
from cpt.train import train

pytestmark = pytest.mark.heavy
QUICK = ("llama", "minimind3_moe")
ADAPTER = "checkpoint-2/adapter_model.safetensors"
IDS = torch.arange(3, 35)[None]
WITHOUT_CPT = """
import sys
sys.modules["cpt"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM
print("ready", flush=True)
for line in sys.stdin:
    folder, written = line.rstrip("\\n").split("\\t")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        torch.save(model(input_ids=torch.arange(3, 35)[None]).logits, written)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def without_cpt(tmp_path_factory):
    """Logits of a model in a process that cannot import cpt."""
    written = tmp_path_factory.mktemp("logits") / "logits.pt"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", WITHOUT_CPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"

    def load(folder: Path) -> torch.Tensor:
        print(folder, written, sep="\t", file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        return torch.load(written)

    yield load
    process.kill()


def logits(model) -> torch.Tensor:
    """Logits of a model in memory or of an exported model."""
    model = (
        AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        if isinstance(model, Path)
        else model
    )
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def trained(recipe, write):
    """Two steps by the Python API: the trainer, its recipe and its tokenizer."""

    def run(**model):
        recipe["model"] = model if "path" in model else {"from_scratch": True, **model}
        recipe["budget"]["tokens"] = 512
        trainer, loaded, tokenizer = trainer_of(write(recipe))
        trainer.train()
        return trainer, loaded, tokenizer

    return run


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TINY],
)
def test_a_family_trains_exports_and_reloads_without_cpt(family, trained, without_cpt, tmp_path):
    vocabulary = (
        {"vocab_size": 384, "unpadded_vocab_size": 320}
        if family == "cpt-gpt2"
        else {"vocab_size": 320}
    )
    trainer, recipe, tokenizer = trained(config=tiny_config(family, **vocabulary))
    before = logits(build_model(recipe, tokenizer))
    exported = without_cpt(export_model(trainer, recipe, tokenizer, tmp_path / "exported"))
    after = logits(trainer.model)
    torch.testing.assert_close(exported, after[..., : exported.shape[-1]])
    assert exported.shape[-1] >= 320 and not torch.allclose(after, before, atol=1e-3)


@pytest.fixture(scope="session")
def adapted(cpt, whole, base_model):
    """The run of an adapter, by the command line."""
    model = f"model={{path: {base_model}, lora: {{r: 4}}}}"
    typed = cpt("train", whole, model, "stage=cpt", "name=adapted", "budget.tokens=512")
    assert typed.returncode == 0, typed.output
    return whole.parent / "runs/adapted"


def test_an_adapter_is_merged_into_an_export_of_equal_logits(adapted, base_model, without_cpt):
    by_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base_model), adapted / "checkpoint-2"
    )
    torch.testing.assert_close(
        without_cpt(adapted / "final"), logits(by_peft), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(logits(adapted / "final"), logits(base_model), atol=1e-4)


def test_only_the_adapter_learns_and_the_base_stays(adapted, base_model):
    assert {"lora_A", "lora_B"} == {name.split(".")[-2] for name in load_file(adapted / ADAPTER)}
    before, after = weights(base_model), weights(adapted / "final")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert before.keys() == after.keys()


def adapter_of(base: Path, folder: Path, *, trained: bool) -> Path:
    """A LoRA adapter by plain peft; not trained, it changes nothing."""
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=not trained)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_foreign_adapter_is_merged_by_hand_or_by_command_alike(cpt, base_model, tmp_path):
    adapter = adapter_of(base_model, tmp_path / "adapter", trained=True)
    by_peft = logits(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_model), adapter)
    )
    assert (
        cpt("merge", "--method", "lora", base_model, adapter, "-o", tmp_path / "merged").returncode
        == 0
    )
    torch.testing.assert_close(logits(tmp_path / "merged"), by_peft, rtol=1e-4, atol=1e-5)


def test_an_adapter_that_changes_nothing_is_refused(cpt, base_model, tmp_path):
    adapter = adapter_of(base_model, tmp_path / "adapter", trained=False)
    merged = cpt("merge", "--method", "lora", base_model, adapter, "-o", tmp_path / "merged")
    assert merged.returncode == 2 and "no effect" in merged.stderr, "and not lost in rounding"
    assert cpt("export", adapter, "-o", tmp_path / "merged").returncode == 2
    assert not (tmp_path / "merged").exists()


SPREAD = {"vocab_size": 320, "initializer_range": 0.3}  # logits as large as a trained model's
FASTER = {  # family -> what changes its logits, besides small sizes
    "mistral": {"sliding_window": 8},
    "granite": {"logits_scaling": 0.25},
    "cohere": {"logit_scale": 4.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "cpt-gpt2": {"vocab_size": 384, "unpadded_vocab_size": 320},
    "phi": {},  # its head has a bias
    "llama": {"tie_word_embeddings": True},
    "falcon_h1": {"lm_head_multiplier": 4.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "hyperclovax": {"logits_scaling": 2.0},
    "gptj": {},
    "starcoder2": {"tie_word_embeddings": False},
    **dict.fromkeys(("gpt2", "nemotron", "nemotron_h", "olmo2", "qwen2", "qwen3"), {}),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"), {}),
    **dict.fromkeys(("minimind2", "minimind2_moe", "minimind3", "minimind3_moe"), {}),
}
ALWAYS = [*FASTER][:6]
WITHOUT_VARLEN = {"gemma2", "gptj", "falcon_h1", "nemotron_h"}


@pytest.mark.parametrize(
    "family",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FASTER],
)
def test_a_faster_way_to_compute_has_the_same_losses(family, trained, recipe):
    """And gradient norms, and weights that move by what a gradient is."""
    config = {"model_type": family, **small_values(family, **{**SPREAD, **FASTER[family]})}
    recipe["training"]["per_device_train_batch_size"] = 1  # micro-batches of unequal labels
    recipe["optimizer"] = {"name": "sgd", "learning_rate": 0.1}
    plain, _, _ = trained(config=config, fused_loss=False, attention="eager")
    fused, _, _ = trained(config=config, fused_loss=True, attention="eager")
    assert fused.model(IDS, labels=IDS).logits.shape[-1] < 320, "all logits are in memory"
    assert_same_steps(fused, plain)
    if family not in WITHOUT_VARLEN:
        by_bounds, _, _ = trained(config=config, fused_loss=False, attention="varlen")
        assert by_bounds.model.config._attn_implementation == "varlen"
        assert_same_steps(by_bounds, plain)


def assert_same_steps(trainer, plain) -> None:
    for figure in ("loss", "grad_norm"):
        found, expected = (
            [line[figure] for line in one.state.log_history if figure in line]
            for one in (trainer, plain)
        )
        assert len(expected) == 2 and found == pytest.approx(expected, rel=1e-5), figure
    found, expected = trainer.model.state_dict(), plain.model.state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_embeddings_can_have_a_learning_rate_of_their_own(trained, recipe):
    """Their update is a third of what it would be, and the update of all others is the same."""
    updates = []
    for own in ({}, {"embedding_learning_rate": 0.3}):
        recipe["optimizer"] = {"name": "sgd", "learning_rate": 0.9, "weight_decay": 0, **own}
        recipe["budget"]["global_batch_tokens"] = 512  # one step
        recipe["schedule"] = {"name": "constant"}
        trainer, loaded, tokenizer = trained(config={**TINY_LLAMA, "initializer_range": 0.3})
        before, after = build_model(loaded, tokenizer).state_dict(), trainer.model.state_dict()
        updates.append({name: after[name] - before[name] for name in before})
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    for name, update in updates[0].items():
        expected = update / 3 if name in ends else update
        assert update.abs().max() > 1e-3, name
        assert torch.allclose(updates[1][name], expected, rtol=1e-4, atol=1e-7), name


@pytest.fixture(scope="module")
def extended(base_model, corpus, tmp_path_factory, cpt):
    """The base with 12 tokens of its domain."""
    folder = tmp_path_factory.mktemp("extended") / "model"
    words = ("--text", corpus / "domain.jsonl", "--add", 12, "--output", folder)
    assert cpt("tokenizer", "extend", base_model, *words).returncode == 0
    return folder


def test_new_tokens_are_grown_as_the_mean_of_their_pieces(base_model, extended):
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (base_model, extended))
    before, after = weights(base_model), weights(extended)
    assert len(new) == len(old) + 12 and before.keys() == after.keys()
    for name, table in before.items():
        rows = min(len(table), len(old))  # those after it have no token yet
        assert after[name][:rows].equal(table[:rows]), f"{name} lost what it had"
    for row in range(len(old), len(new)):
        pieces = old(new.decode([row]), add_special_tokens=False)["input_ids"]
        assert len(pieces) > 1
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            torch.testing.assert_close(after[name][row], before[name][pieces].mean(0))


def test_only_the_parts_that_the_recipe_names_learn(trained):
    trainer, recipe, tokenizer = trained(config=TINY_LLAMA, train_only=["layers.1", "lm_head"])
    before, after = build_model(recipe, tokenizer).state_dict(), trainer.model.state_dict()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.startswith(("model.layers.1.", "lm_head."))}


def test_a_models_file_alone_is_built(base_model, tmp_path):
    (tmp_path / "model.yaml").write_text(f"path: {base_model}\n")
    model = build_model(tmp_path / "model.yaml")
    assert all(weights(base_model)[name].equal(value) for name, value in model.state_dict().items())
    tiny = "recipes/models/tiny/llama.yaml"
    changes = ["model.from_scratch=true", "model.dtype=bfloat16"]
    half, again = (
        build_model(tiny, "recipes/tiny/tokenizer", [*changes, f"seed={seed}"]) for seed in (1, 2)
    )
    assert half.dtype == torch.bfloat16 and not half.lm_head.weight.equal(again.lm_head.weight)
    with pytest.raises(RecipeError, match="from_scratch: true"):
        build_model(tiny, "recipes/tiny/tokenizer")


def test_only_the_new_rows_learn_where_the_recipe_says_so(extended, recipe, trained):
    recipe["tokenizer"] = {}
    trainer, _, tokenizer = trained(path=str(extended), train_only="new_rows")
    before, after = weights(extended), trainer.model.state_dict()
    tables = {name for name in before if "embed_tokens" in name or "lm_head" in name}
    assert all(after[name].equal(before[name]) for name in before.keys() - tables)
    first = len(tokenizer) - 12
    for name in tables:
        changed = (after[name] != before[name]).any(1)
        assert not changed[:first].any(), f"{name} changed in old rows"
        assert changed[first:].any(), f"{name} did not learn"


def test_a_tokenizer_larger_than_the_model_is_refused_until_asked_for(
    extended, base_model, recipe, trained
):
    recipe["tokenizer"] = {"path": str(extended)}
    with pytest.raises(RecipeError, match="resize_embeddings"):
        trained(path=str(base_model))
    trainer, loaded, tokenizer = trained(path=str(base_model), resize_embeddings=True)
    assert trainer.model.config.vocab_size >= len(tokenizer) == 330
    before, grown = weights(base_model), build_model(loaded, tokenizer).state_dict()
    for name, value in before.items():
        rows = min(len(value), 318)  # the tokens of the base
        assert grown[name][:rows].equal(value[:rows]), f"{name} lost what it had"


def other_than(base: Path, folder: Path, seed: int) -> Path:
    """A model of the base's shape with weights of its own."""
    torch.manual_seed(seed)
    shutil.copytree(base, folder)
    LlamaForCausalLM(LlamaForCausalLM.config_class.from_pretrained(base)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_mean_of_models_is_the_mean_by_hand(cpt, base_model, tmp_path):
    others = [other_than(base_model, tmp_path / str(seed), seed) for seed in (1, 2)]
    assert (
        cpt("merge", "--method", "average", base_model, *others, "-o", tmp_path / "mean").returncode
        == 0
    )
    assert_is_mean(tmp_path / "mean", [base_model, *others])


def assert_is_mean(model: Path, of: list[Path]) -> None:
    parts = [weights(folder) for folder in of]
    mean = weights(model)
    assert mean.keys() == parts[0].keys()
    for name, value in mean.items():
        torch.testing.assert_close(
            value, torch.stack([part[name].double() for part in parts]).mean(0).float()
        )


def test_the_average_of_a_run_is_the_mean_of_its_last_checkpoints(recipe, write):
    recipe |= {"checkpoints": {"every_steps": 2, "average": 3}}
    run = train(load_recipe(write(recipe))).parent
    assert_is_mean(run / "average", [run / f"checkpoint-{step}" for step in (4, 6, 8)])


@pytest.mark.slow
def test_a_chat_vector_is_added_as_written_by_hand(cpt, base_model, tmp_path):
    places = {"after": tmp_path / "run" / "final", "chat": tmp_path / "chat"}
    folders = {
        name: other_than(base_model, place, seed)
        for seed, (name, place) in enumerate(places.items())
    }
    (tmp_path / "run" / "recipe.yaml").touch()
    (tmp_path / "run" / "status.json").write_text('{"state": "finished"}')
    words = (
        "--after",
        tmp_path / "run",
        "--base",
        base_model,
        "--chat",
        folders["chat"],
        "--scale",
        0.5,
    )
    assert (
        cpt("merge", "--method", "task_arithmetic", *words, "-o", tmp_path / "out").returncode == 0
    )
    base, after, chat, out = map(weights, (base_model, *folders.values(), tmp_path / "out"))
    assert out.keys() == base.keys()
    for name, value in out.items():
        torch.testing.assert_close(
            value, after[name] + 0.5 * (chat[name] - base[name]), rtol=1e-5, atol=1e-6
        )
