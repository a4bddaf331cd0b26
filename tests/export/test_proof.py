"""What proves an export: its logits in another process, its vocabulary, and a seal of its files."""

import copy
import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import random_llama, save_llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from cpt.errors import CheckpointError, DataError
from cpt.export.proof import (
    NUM_TOKENS,
    brings_its_code,
    check_seal,
    check_vocabulary,
    difference,
    logits_in_another_process,
    logits_of,
    model_warnings,
    proof_text,
    reload_and_compare,
    write_seal,
)


@pytest.fixture(scope="session")
def tokenizer(base_folder):
    return AutoTokenizer.from_pretrained(base_folder)


def test_the_text_is_cut_to_what_the_model_takes(tokenizer, tmp_path):
    assert len(proof_text(tokenizer, LlamaConfig()).ids) == NUM_TOKENS
    assert len(proof_text(tokenizer, GPT2Config(n_positions=64)).ids) == 64
    (tmp_path / "mine.txt").write_text("the model reads")
    assert (
        tokenizer.decode(proof_text(tokenizer, LlamaConfig(), tmp_path / "mine.txt").ids)
        == "the model reads"
    )
    assert len(proof_text(tokenizer, GPT2Config(n_positions=2)).ids) == 2
    with pytest.raises(DataError, match="fewer than two tokens"):
        proof_text(tokenizer, GPT2Config(n_positions=1))


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_text_that_cannot_be_used_is_refused(tokenizer, tmp_path, content):
    if content is not None:
        (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(DataError, match="mine.txt"):
        proof_text(tokenizer, LlamaConfig(), tmp_path / "mine.txt")


def test_a_difference_is_allowed_by_the_dtype_or_by_the_users_own_tolerance():
    one = torch.tensor([[10.0, 0.0]])
    other = one + torch.tensor([[0.0, 0.1]])
    assert (
        difference(one, other, torch.bfloat16).is_allowed
        and not difference(one, other, torch.float32).is_allowed
    )
    assert difference(one, other, torch.float32, tolerance=0.02).is_allowed
    assert not difference(one, one * torch.nan, torch.bfloat16).is_allowed


@pytest.mark.parametrize(
    ("dtype", "tolerance", "allowed"),
    [
        (torch.float32, None, 1e-4),
        (torch.float16, None, 1e-2),
        (torch.bfloat16, None, 5e-2),
        (torch.bfloat16, 0.0, 0.0),
    ],
)
def test_a_difference_is_over_the_tokens_of_both_vocabularies(dtype, tolerance, allowed):
    one = torch.tensor([[1.0, -8.0, 2.0], [3.0, 4.0, 5.0]])
    other = torch.tensor([[1.0, -8.0, 2.5, 99.0], [3.0, 3.25, 5.0, 99.0]])
    for pair in ((one, other), (other, one)):
        found = difference(*pair, dtype, tolerance)
        assert (found.largest, found.largest_logit) == (0.75, 8.0)
        assert found.allowed == pytest.approx(8 * allowed)
    text = f"0.75 (allowed {8 * allowed:.2g}; largest logit 8)"
    assert str(difference(one, other, dtype, tolerance)) == text
    assert difference(one, one, dtype, 0.0).is_allowed


def test_logits_of_a_model_leave_it_as_it_was():
    model = random_llama(attention_dropout=0.9).bfloat16()
    for is_training in (True, False):
        logits = logits_of(model.train(is_training), list(range(20)))
        assert model.training is is_training
        assert (logits.shape, logits.dtype, logits.requires_grad) == (
            (20, 320),
            torch.float32,
            False,
        )
        with torch.no_grad():
            expected = model.eval()(torch.arange(20)[None]).logits[0]
        assert torch.equal(logits, expected.float())


def test_weights_that_changed_on_the_way_are_refused(
    base_folder, tokenizer, tokenizer_folder, tmp_path, reloads_here
):
    text = proof_text(tokenizer, LlamaConfig())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(base_folder), text.ids)
    other = save_llama(tmp_path / "other", tokenizer_folder, seed=2)
    with pytest.raises(CheckpointError, match="different logits"):
        reload_and_compare(other, text, expected, torch.float32)


def test_a_reward_model_is_proven_by_its_score(base_folder, tokenizer, tmp_path, reloads_here):
    folder = shutil.copytree(base_folder, tmp_path / "reward")
    config = LlamaConfig.from_pretrained(folder, num_labels=1, pad_token_id=0)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    text = proof_text(tokenizer, config)
    score = logits_in_another_process(folder, text, torch.float32)
    with torch.no_grad():
        assert torch.equal(score, model(torch.tensor([text.ids])).logits[0])


def test_a_model_is_loaded_back_in_the_dtype_and_on_the_device_that_were_asked_for(
    base_folder, tokenizer, reloads_here
):
    text = proof_text(tokenizer, LlamaConfig())
    logits = logits_in_another_process(base_folder, text, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16)
    assert torch.equal(logits, logits_of(model, text.ids)) and logits.dtype == torch.float32
    assert not torch.equal(logits, logits_of(model.float(), text.ids))
    with pytest.raises(CheckpointError, match="cannot be called on meta tensors"):
        logits_in_another_process(base_folder, text, torch.float32, device="meta")
    assert [job["device"] for job in reloads_here] == [None, "meta"]


def damage_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))


def change_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_tokenizer, "tokenizer gives different tokens"),
        (
            change_tensors(lambda known: known.pop("lm_head.weight")),
            r"missing \['lm_head.weight'\]",
        ),
        (
            change_tensors(lambda known: known.update(other=torch.ones(3))),
            r"missing \[\], unknown \['other'\]",
        ),
    ],
)
def test_what_cannot_be_loaded_back_completely_is_refused(
    base_folder, tokenizer, tmp_path, reloads_here, damage, named
):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    damage(folder)
    with pytest.raises(CheckpointError, match=named):
        logits_in_another_process(folder, proof_text(tokenizer, LlamaConfig()), torch.float32)


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        ("", "it exited without a message"),
        (
            "Traceback:\n  x\nKeyError: 'a'\n  during\nmy.lib.OddError: b\n  at c",
            "my.lib.OddError: b at c",
        ),
        ("warning: x\nmissing  weights", "missing weights"),
        (f"ValueError: {'a' * 500}", f"ValueError: {'a' * 388}"),
    ],
)
def test_the_last_error_of_the_other_process_is_reported(
    base_folder, tokenizer, monkeypatch, stderr, why
):
    ended = SimpleNamespace(returncode=1, stderr=stderr)
    processes = SimpleNamespace(run=lambda *_, **__: ended)
    monkeypatch.setattr("cpt.export.proof.subprocess", processes)
    with pytest.raises(CheckpointError) as raised:
        logits_in_another_process(base_folder, proof_text(tokenizer, LlamaConfig()), torch.float32)
    assert str(raised.value).endswith(f"cannot load {base_folder}: {why}")


OWN_CODE = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}


@pytest.mark.parametrize(
    ("auto_map", "is_trusted"),
    [
        ({}, False),
        (OWN_CODE, True),
        (OWN_CODE | {"AutoModelForCausalLM": "someone/repository--mine.Model"}, False),
    ],
)
def test_code_is_trusted_only_if_all_of_it_is_in_the_folder(tmp_path, auto_map, is_trusted):
    assert not brings_its_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert not brings_its_code(tmp_path)
    (tmp_path / "mine.py").touch()
    assert brings_its_code(tmp_path) == is_trusted


# --- what servers do with it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "is_warned"),
    [
        ("eos", False),
        (["eos", 99], False),
        (99, True),
        ([98, 99], True),
        (None, True),
        (..., False),
    ],
)
def test_another_end_of_generation_is_a_warning(tokenizer, tmp_path, ends, is_warned):
    eos = tokenizer.eos_token_id
    ends = (
        {"eos": eos}.get(ends, ends)
        if not isinstance(ends, list)
        else [eos if end == "eos" else end for end in ends]
    )
    if ends is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    warning = (
        f"warning: generation_config.json ends at token {ends}, documents at {eos}"
        f" ({tokenizer.eos_token}): a server may not stop. Set eos_token_id there."
    )
    template = (
        "No chat template: servers only complete text. SFT on chats or a chat vector adds one."
    )
    copied = copy.deepcopy(tokenizer)
    for copied.chat_template, lines in (("{{ messages }}", []), (None, [template])):
        assert model_warnings(tmp_path, copied) == [warning] * is_warned + lines


def test_rows_without_tokens_are_padding_and_tokens_without_rows_an_error(tokenizer):
    assert check_vocabulary(320, tokenizer) == "Vocabulary: 320 tokens in 320 embedding rows."
    padded = "Vocabulary: 320 tokens in 1,321 embedding rows (1,001 rows are padding)."
    assert check_vocabulary(1321, tokenizer) == padded
    with pytest.raises(CheckpointError, match="has 320 tokens, the model 319 embedding rows"):
        check_vocabulary(319, tokenizer)


# --- the seal --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("# card")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "export.json").write_text("{}")
    lines = ["Reading x", "The export loaded back: difference 0.", "Wrote x", "Serve it: cpt serve"]
    write_seal(tmp_path, lines)
    return tmp_path


def test_a_proven_export_may_have_its_card_edited(sealed):
    (sealed / "README.md").write_text("# a better card")
    assert check_seal(sealed) == sealed
    seal = json.loads((sealed / "export.json").read_text())
    assert seal["proof"] == ["The export loaded back: difference 0."]
    assert seal["files"].keys() == {"model.safetensors", "README.md", "adapter/export.json"}
    assert seal["files"]["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()


def test_files_that_changed_after_the_proof_are_named(sealed):
    (sealed / "README.md").write_text("# a better card")
    (sealed / "model.safetensors").write_bytes(b"other")
    (sealed / "notes.txt").touch()
    (sealed / "adapter" / "export.json").unlink()
    with pytest.raises(
        CheckpointError, match=": adapter/export.json, model.safetensors, notes.txt. Redo"
    ):
        check_seal(sealed)
    (sealed / "README.md").unlink()
    with pytest.raises(CheckpointError, match=": README.md, adapter"):
        check_seal(sealed)
    (sealed / "export.json").unlink()
    with pytest.raises(CheckpointError, match="not a verified export"):
        check_seal(sealed)
