"""Stages: each learns a task whose answer is known, and has the loss of TRL's own trainer where TRL has one."""

import json
import random
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from promises.conftest import trainer_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl.experimental import cpo, gkd, orpo

from cpt import export_model

pytestmark = pytest.mark.heavy
ENTRIES = ["<unk>", "<pad>", "<eos>", "user", "assistant", *(f"w{number}" for number in range(27))]
CHAT = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SHAPE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "eos_token_id": 2, "bos_token_id": None, "pad_token_id": 1}


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """A Llama of random weights that knows 27 words and a chat."""
    folder = tmp_path_factory.mktemp("words")
    backend = Tokenizer(
        WordLevel({word: row for row, word in enumerate(ENTRIES)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "eos")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def said(text: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def pairs(count: int, seed: int = 0) -> list[dict]:
    """Answers that begin with w20 are better than those that begin with w21."""
    draw = random.Random(seed)
    return [
        {
            "prompt": said(f"w{draw.randrange(10)} w{draw.randrange(10)}", "user"),
            "chosen": said(f"w20 w{draw.randrange(20)}"),
            "rejected": said(f"w21 w{draw.randrange(20)} w22"),
        }
        for _ in range(count)
    ]


def labelled(count: int) -> list[dict]:
    """The same answers, one at a time."""
    sides = ("chosen", "rejected")
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs(count // 2)
        for side in sides
    ]


def chats() -> list[dict]:
    """Eight questions with an answer of one or two words each."""
    turns = ((f"w{number} w9", f"w{26 - number} w{10 + number}") for number in range(8))
    return [{"messages": said(question, "user") + said(answer)} for question, answer in turns]


@pytest.fixture
def stage_trainer(words, write, tmp_path):
    """A stage's trainer on rows, of the model above."""

    def build(stage, rows, *, steps=4, batch=8, model=None, data=None, **training):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections = {
            "name": "run",
            "stage": stage,
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": str(words), **(model or {})},
            "data": {
                "sequence_length": 32,
                "max_text_loss": 1.0,  # the tokenizer knows words, not the blanks between them
                "sources": [{"path": str(tmp_path / "rows.jsonl")}],
                **(data or {}),
            },
            "budget": {"tokens": steps * batch * 32},
            "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0},
            "training": {
                "use_cpu": True,
                "per_device_train_batch_size": batch,
                "logging_steps": 1,
                **training,
            },
        }
        return trainer_of(write(sections))

    return build


def moved(model) -> None:
    """Away from the reference, where a loss would be the same whatever the formula."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def loss_of_a_batch(trainer, **options) -> float:
    """The loss of the first batch; it holds all rows."""
    trainer.model.eval()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return float(trainer.compute_loss(trainer.model, batch, **options))


PREFERENCES = {
    "dpo": ({}, trl.DPOTrainer, trl.DPOConfig),
    "dpo-ipo": ({"loss_type": ["ipo"], "beta": 0.3}, trl.DPOTrainer, trl.DPOConfig),
    "orpo": ({"beta": 0.2}, orpo.ORPOTrainer, orpo.ORPOConfig),
    "cpo": ({}, cpo.CPOTrainer, cpo.CPOConfig),
    "cpo-simpo": ({"loss_type": "simpo", "cpo_alpha": 0.0}, cpo.CPOTrainer, cpo.CPOConfig),
    "kto": ({"loss_type": "apo_zero_unpaired"}, trl.KTOTrainer, trl.KTOConfig),
}


def trls_trainer(theirs, config, folder, rows, tokenizer, model, *, teacher=None, **options):
    """TRL's own trainer of one batch."""
    arguments = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": []}
    return theirs(
        model=model,
        args=config(per_device_train_batch_size=8, **arguments, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **({"teacher_model": teacher} if teacher else {}),
    )


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("dpo", "kto") else pytest.param(name, marks=pytest.mark.slow)
        for name in PREFERENCES
    ],
)
def test_a_preference_loss_is_that_of_trls_own_trainer(name, stage_trainer, words, tmp_path):
    options, theirs, config = PREFERENCES[name]
    stage = name.partition("-")[0]
    rows = labelled(8) if stage == "kto" else pairs(8)
    ours, _, tokenizer = stage_trainer(stage, rows, **options)
    model = AutoModelForCausalLM.from_pretrained(words)
    other = trls_trainer(theirs, config, tmp_path, rows, tokenizer, model, **options)
    before = loss_of_a_batch(ours)
    moved(ours.model)
    moved(other.model)
    assert (
        loss_of_a_batch(ours)
        == pytest.approx(loss_of_a_batch(other), rel=1e-5)
        != pytest.approx(before, rel=1e-3)
    )


def test_a_reward_models_loss_is_that_of_trls_own_trainer(stage_trainer, tmp_path):
    rows = pairs(8)
    ours, _, tokenizer = stage_trainer("reward", rows)
    moved(ours.model)
    model = type(ours.model)(ours.model.config)
    model.load_state_dict(ours.model.state_dict())
    other = trls_trainer(trl.RewardTrainer, trl.RewardConfig, tmp_path, rows, tokenizer, model)
    assert loss_of_a_batch(ours) == pytest.approx(loss_of_a_batch(other), rel=1e-5)


def test_the_loss_of_sft_is_that_of_trls_own_trainer(stage_trainer, words, tmp_path):
    ours, _, tokenizer = stage_trainer("sft", chats(), data={"packing": "none"})
    split = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in chats()]
    model = AutoModelForCausalLM.from_pretrained(words)
    other = trls_trainer(trl.SFTTrainer, trl.SFTConfig, tmp_path, split, tokenizer, model)
    moved(ours.model)
    moved(other.model)
    assert loss_of_a_batch(ours) == pytest.approx(loss_of_a_batch(other), rel=1e-5)


@pytest.fixture
def teacher(words, tmp_path):
    """A model of other weights, sure of what it says."""
    torch.manual_seed(7)
    config = LlamaConfig(**SHAPE, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_the_loss_of_gkd_is_that_of_trls_own_trainer(stage_trainer, words, teacher, tmp_path):
    options = {"lmbda": 0.0, "beta": 0.3, "temperature": 0.9}
    ours, _, tokenizer = stage_trainer(
        "gkd", chats(), data={"packing": "none"}, teacher_model_name_or_path=str(teacher), **options
    )
    model, other_teacher = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (words, teacher)
    )
    options["max_length"] = 32
    other = trls_trainer(
        gkd.GKDTrainer,
        gkd.GKDConfig,
        tmp_path,
        chats(),
        tokenizer,
        model,
        teacher=other_teacher,
        **options,
    )
    assert loss_of_a_batch(ours) == pytest.approx(loss_of_a_batch(other), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_of_distillation_is_the_divergence_written_by_hand(beta, stage_trainer, teacher):
    ours, _, _ = stage_trainer(
        "distill",
        chats(),
        data={"packing": "none"},
        teacher_model_name_or_path=str(teacher),
        beta=beta,
    )
    batch = next(iter(ours.get_train_dataloader()))
    learned = batch["labels"][:, 1:] != -100
    models = AutoModelForCausalLM.from_pretrained(teacher), ours.model.eval()
    p, q = (F.softmax(model(batch["input_ids"]).logits[:, :-1].double(), -1) for model in models)
    mean = beta * p + (1 - beta) * q
    forward = (p * (p / (q if beta == 0 else mean)).log()).sum(-1)
    reverse = (q * (q / (p if beta == 1 else mean)).log()).sum(-1)
    divergence = {0.0: forward, 0.5: beta * forward + (1 - beta) * reverse, 1.0: reverse}[beta]
    loss = ours.compute_loss(ours.model, batch, num_items_in_batch=learned.sum())
    assert float(loss) == pytest.approx(float(divergence[learned].mean()), rel=1e-4)


def test_packed_conversations_have_the_loss_of_each_alone(stage_trainer):
    losses = {}
    for packing, count in (("best_fit", 2), ("none", 8)):
        trainer, _, _ = stage_trainer("sft", chats(), batch=1, data={"packing": packing})
        rows = (trainer.rows[number] for number in range(count))
        batches = [{name: value[None] for name, value in row.items()} for row in rows]
        learned = torch.tensor(
            sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        )
        model = trainer.model.eval()
        parts = [
            float(trainer.compute_loss(model, batch, num_items_in_batch=learned))
            for batch in batches
        ]
        losses[packing] = sum(parts), int(learned)
    assert losses["best_fit"] == pytest.approx(losses["none"], rel=1e-5)


def test_sft_learns_its_answers_by_heart(stage_trainer, tmp_path):
    trainer, recipe, tokenizer = stage_trainer("sft", chats(), steps=120)
    trainer.train()
    exported = export_model(trainer, recipe, tokenizer, tmp_path / "exported")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(exported),
        AutoTokenizer.from_pretrained(exported),
    )
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    for question, answer in (row["messages"] for row in chats()):
        prompt = tokenizer.apply_chat_template([question], **options)
        written = model.generate(**prompt, max_new_tokens=5, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(written) == answer["content"] + " <eos>"
