"""What `cpt export` writes and prints, read back by plain libraries; the proofs run in this process."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import write_recipe
from tiny_checkpoints import random_llama, save_adapter, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from typed_export import export

from cpt.checkpoints.model_folder import Tensors
from cpt.errors import CheckpointError
from cpt.export.proof import logits_of
from cpt.export.trained import find_trained
from cpt.export.write import (
    ExportOptions,
    check_output,
    export_adapter,
    export_whole,
    is_plain,
    rounded_to,
)
from cpt.models.config import hash_weights
from cpt.models.new_rows import EXTENSION

pytestmark = pytest.mark.usefixtures("reloads_here")
LOADED = (
    "The {} loaded back by plain {}, in a process without cpt: largest logit difference 0 (allowed"
)
IDS = list(range(5, 40))


def whole(folder, output, **options):
    return list(export_whole(find_trained(folder), output, ExportOptions(**options)))


def alone(folder, output, text=None):
    return list(export_adapter(find_trained(folder), output, text))


def logits(folder):
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), IDS)


@pytest.fixture(scope="module")
def padded(tokenizer_folder, tmp_path_factory):
    """A model with 328 rows for 320 tokens, whose largest logits are far from 1."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    save_llama(folder, tokenizer_folder, 3, vocab_size=328)
    random_llama(3, vocab_size=328).save_pretrained(folder)
    return folder


def test_a_model_is_rounded_and_written_in_shards_with_a_report(padded, tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.export.write.LARGEST_FILE", "50KB")
    report = whole(padded, tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    size = sum(file.stat().st_size for file in shards) / 1e6
    assert report[0].startswith("Rounded from float32 to bfloat16: largest logit difference ")
    assert report[1].startswith(LOADED.format("export", "transformers"))
    assert report[2:] == [
        "Vocabulary: 320 tokens in 328 embedding rows (8 rows are padding).",
        f"Wrote {tmp_path / 'out'}: LlamaForCausalLM, {size:.1f} MB of bfloat16 in"
        f" {len(shards)} safetensors files, with README.md.",
        f"Serve it: cpt serve {tmp_path / 'out'}",
    ]
    assert len(shards) > 1 and all(file.stat().st_size < 60_000 for file in shards)
    for name in Tensors(padded).files:
        expected = Tensors(padded).read(name).bfloat16()
        assert torch.equal(Tensors(tmp_path / "out").read(name), expected), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "# out" in (tmp_path / "out/README.md").read_text()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 320


def test_a_model_in_its_own_dtype_is_not_rounded_and_in_one_file(padded, tmp_path):
    report = whole(padded, tmp_path / "out", dtype=torch.float32)
    assert report[0].startswith(LOADED.format("export", "transformers")) and len(report) == 4
    assert " of float32 in 1 safetensors file, " in report[-2]
    assert torch.equal(logits(tmp_path / "out"), logits(padded))


def test_rounding_above_the_tolerance_leaves_no_folder(padded, tmp_path):
    with pytest.raises(CheckpointError, match="--dtype float32"):
        whole(padded, tmp_path / "out", tolerance=1e-7)
    assert list(tmp_path.iterdir()) == []
    report = whole(padded, tmp_path / "out", dtype=torch.float16, tolerance=0.5)
    assert report[0].startswith("Rounded from float32 to float16")


def test_an_export_that_loads_back_differently_leaves_no_folder(padded, tmp_path, monkeypatch):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"] *= 2
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr("cpt.export.write.finish", damage)
    with pytest.raises(CheckpointError, match="export has different logits if plain transformers"):
        whole(padded, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_users_choose_the_text_of_the_comparison(padded, tmp_path, reloads_here):
    (tmp_path / "text.txt").write_text("the model reads of amines")
    whole(padded, tmp_path / "out", text=tmp_path / "text.txt")
    assert reloads_here[0]["text"] == "the model reads of amines"
    assert len(reloads_here[0]["ids"]) < 20 and reloads_here[0]["dtype"] == "bfloat16"


def test_a_pth_has_the_tensors_of_the_export_and_its_tied_head(tokenizer_folder, tmp_path):
    for tied in (True, False):
        folder, output = tmp_path / f"model {tied}", tmp_path / f"out {tied}"
        save_llama(folder, tokenizer_folder, seed=1, tie_word_embeddings=tied)
        report = whole(folder, output, pth=True)
        size = (output / "model.pth").stat().st_size
        told = "a state dict for torch.load(..., weights_only=True)."
        assert report[-3] == f"model.pth: {size / 1e6:,.1f} MB, {told}"
        state = torch.load(output / "model.pth", weights_only=True)
        exported = AutoModelForCausalLM.from_pretrained(output).state_dict()
        assert state.keys() == exported.keys()
        assert all(torch.equal(exported[name], state[name]) for name in state)
        assert size < 1.5 * (output / "model.safetensors").stat().st_size


# --- adapters --------------------------------------------------------------------------------------------------------


def peft_logits(base, adapter):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits_of(PeftModel.from_pretrained(model, adapter), IDS)


def test_an_adapter_is_merged_and_each_step_is_reported(base_folder, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", base_folder, target_modules=["q_proj", "up_proj"])
    report = whole(adapter, tmp_path / "out", dtype=torch.float32)
    changed = peft_logits(base_folder, adapter) - logits(base_folder)
    assert changed.abs().max() > 0.01
    begin, middle, end = report[0].partition(" by up to ")
    assert begin == "The adapter changes logits" and end.endswith(" (4 of 21 tensors).")
    assert report[1].startswith("Adapter against merged model in float32: largest logit difference")
    assert report[2].startswith(LOADED.format("export", "transformers")) and len(report) == 6
    torch.testing.assert_close(
        logits(tmp_path / "out"), peft_logits(base_folder, adapter), rtol=1e-4, atol=1e-5
    )


def test_an_adapter_of_a_kind_that_cannot_be_merged_is_refused(adapter_folder, tmp_path):
    folder = tmp_path / "prompt"
    shutil.copytree(adapter_folder, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["peft_type"] = "PROMPT_TUNING"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="an adapter of PROMPT_TUNING cannot be merged"):
        whole(folder, tmp_path / "out")


def save_scaled(folder, adapter, base, factor):
    """The adapter times a factor, for another base."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name: x * factor if "lora_B" in name else x for name, x in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_smaller_than_its_rounding_is_a_warning(base_folder, adapter_folder, tmp_path):
    warning = (
        "warning: rounding to bfloat16 changes more than the adapter did. Use --dtype float32."
    )
    report = whole(adapter_folder, tmp_path / "out")
    words = "Adapter against merged model in bfloat16: largest logit difference"
    assert report[2].startswith(words) and warning not in report
    small = save_scaled(tmp_path / "adapter", adapter_folder, base_folder, 0.002)
    assert whole(small, tmp_path / "small")[3] == warning


def test_an_adapter_that_rounding_removes_is_refused(base_folder, adapter_folder, tmp_path):
    base = shutil.copytree(base_folder, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors = {name: (x + 0.01 * x.sign()).bfloat16().float() for name, x in tensors.items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    adapter = save_scaled(tmp_path / "adapter", adapter_folder, base, 1e-4)
    with pytest.raises(CheckpointError, match="in bfloat16 .* lost in rounding"):
        whole(adapter, tmp_path / "lost")
    assert "(14 of 21 tensors)" in whole(adapter, tmp_path / "kept", dtype=torch.float32)[0]


def test_a_merge_that_differs_by_more_than_the_tolerance_is_refused(adapter_folder, tmp_path):
    with pytest.raises(CheckpointError, match="merged model in float32 differs from base with"):
        whole(adapter_folder, tmp_path / "out", tolerance=1e-9)
    with pytest.raises(CheckpointError, match="merged model in bfloat16 differs from base with"):
        whole(adapter_folder, tmp_path / "out", tolerance=1e-5)


def test_an_adapter_without_effect_is_refused(base_folder, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", base_folder, zeroed=True)
    for write in (whole, alone):
        with pytest.raises(CheckpointError, match="no effect"):
            write(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_adapter_alone_is_written_for_plain_peft(adapter_folder, base_folder, tmp_path):
    (tmp_path / "text.txt").write_text("the model reads of amines")
    report = alone(adapter_folder, tmp_path / "out", tmp_path / "text.txt")
    assert report[0].startswith(LOADED.format("adapter", "peft"))
    assert report[1:] == [
        f"Wrote {tmp_path / 'out'}: the adapter alone. It needs its base, {base_folder}."
    ]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    own = {"adapter_config.json", "adapter_model.safetensors", "base_weights.json", "README.md"}
    assert own < names and "model.safetensors" not in names and "config.json" not in names
    record = json.loads((tmp_path / "out" / "base_weights.json").read_text())
    assert record == {"path": str(base_folder), "sha256": hash_weights(str(base_folder))}
    assert "AutoPeftModelForCausalLM" in (tmp_path / "out/README.md").read_text()
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and "backend" not in config
    expected = peft_logits(base_folder, adapter_folder)
    assert torch.equal(peft_logits(base_folder, tmp_path / "out"), expected)


def test_an_adapter_of_a_base_that_plain_peft_builds_differently_is_not_verified(
    adapter_folder, base_folder, tmp_path, monkeypatch, reloads_here
):
    monkeypatch.setattr("cpt.export.write.is_plain", lambda path, base: path != str(base_folder))
    report = alone(adapter_folder, tmp_path / "out")
    assert len(report) == 2 and reloads_here == []
    assert report[0].startswith(f"NOT VERIFIED with plain peft: {base_folder} does not match")


def test_a_chat_model_and_its_new_tokens_are_exported_as_the_run_left_them(
    tiny_recipe, padded, tmp_path
):
    """The export ends at turns too, and lists new tokens: of the run's model, else of its base."""
    run, base = tmp_path / "runs" / "tiny", tmp_path / "base"
    base.mkdir()
    checkpoint = shutil.copytree(padded, run / "checkpoint-3")
    write_recipe({**tiny_recipe, "stage": "sft", "model": {"path": str(base)}}, run / "recipe.yaml")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 7}')
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / EXTENSION).write_text(json.dumps({"tokens": [{"id": 5}]}))
    whole(run, tmp_path / "out", dtype=torch.float32)
    ends = json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"]
    assert ends == [7, tokenizer.eos_token_id]
    listed = json.loads((tmp_path / "out" / EXTENSION).read_text())
    assert listed == {"tokens": [{"id": 5}]}
    (checkpoint / EXTENSION).rename(base / EXTENSION)
    whole(run, tmp_path / "again", dtype=torch.float32)
    assert json.loads((tmp_path / "again" / EXTENSION).read_text()) == listed
    whole(checkpoint.rename(tmp_path / "alone"), tmp_path / "third", dtype=torch.float32)
    assert not (tmp_path / "third" / EXTENSION).exists()


def test_the_hashes_that_a_run_recorded_go_with_its_adapter(adapter_folder, base_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    recorded = {"renamed.safetensors": hash_weights(str(base_folder))["model.safetensors"]}
    (adapter / "base_weights.json").write_text(json.dumps({"path": "", "sha256": recorded}))
    alone(adapter, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "base_weights.json").read_text())
    assert record == {"path": str(base_folder), "sha256": recorded}
    recorded["renamed.safetensors"] = "0" * 64
    (adapter / "base_weights.json").write_text(json.dumps({"path": "", "sha256": recorded}))
    with pytest.raises(CheckpointError, match=r"the sha256 of renamed.safetensors differ"):
        alone(adapter, tmp_path / "other")


@pytest.mark.parametrize("kind", ["model", "zero"])
def test_what_is_no_adapter_of_peft_has_no_adapter_to_export(base_folder, tmp_path, kind):
    folder = base_folder
    if kind == "zero":
        folder = tmp_path / "checkpoint"
        (folder / "global_step1").mkdir(parents=True)
        (folder / "latest").write_text("global_step1")
        (folder / "global_step1" / "rank_0_optim_states.pt").touch()
    remedy = "Remove --adapter-only" if kind == "model" else "Export it merged: remove"
    with pytest.raises(CheckpointError, match=remedy):
        alone(folder, tmp_path / "out")


def test_a_base_that_plain_transformers_would_build_differently_is_known(base_folder):
    grown = random_llama(vocab_size=324)
    assert is_plain(str(base_folder), random_llama())
    assert not is_plain(str(base_folder), grown) and not is_plain(None, random_llama())
    assert is_plain("owner/on-the-hub", grown)


# --- where ---


def test_the_output_is_a_new_or_empty_folder_in_one_that_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for new in ("empty", "new", "new/deeper/still"):
        check_output(tmp_path / new)
    monkeypatch.chdir(tmp_path)
    for taken, why in {".": "not empty", "file": "not empty", "file/in": "is a file"}.items():
        with pytest.raises(CheckpointError, match=why):
            check_output((tmp_path / taken).relative_to(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        check_output(tmp_path / "new/deeper")


def test_layers_that_a_model_keeps_in_fp32_are_not_rounded():
    model = random_llama()
    model._keep_in_fp32_modules_strict = {"mlp"}
    rounded = rounded_to(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in rounded.named_parameters()}
    full = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert full == {name for name in dtypes if ".mlp." in name}
    assert model.config.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_report_is_sealed_with_the_export_and_names_what_was_read(padded, tmp_path):
    printed = export(padded, "-o", tmp_path / "out", "--dtype", "float32").splitlines()
    assert printed[0] == f"Reading {padded} (model)."
    proof = json.loads((tmp_path / "out/export.json").read_text())["proof"]
    assert proof == [line for line in printed if not line.startswith(("Reading", "Wrote", "Serve"))]


def test_a_run_exports_its_checkpoint_with_the_card_of_its_step(
    tiny_recipe, base_folder, adapter_folder, tmp_path
):
    run = tmp_path / "runs" / "tiny"
    checkpoint = shutil.copytree(adapter_folder, run / "checkpoint-3")
    sections = {**tiny_recipe, "stage": "cpt", "model": {"path": str(base_folder), "lora": {}}}
    write_recipe(sections, run / "recipe.yaml")
    (checkpoint / "trainer_state.json").write_text("{}")
    for write in (whole, alone):
        output = tmp_path / write.__name__
        write(run, output)
        card = (output / "README.md").read_text()
        assert "The model was saved at step 3." in card and f"# {output.name}\n" in card
