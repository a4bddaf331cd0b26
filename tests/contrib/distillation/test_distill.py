import json

import pytest
import torch
from stages.formulas import jensen_shannon
from tiny import tiny_config, write_recipe
from tiny_checkpoints import save_llama
from tiny_tasks import TINY
from tiny_teachers import student_trainer

from cpt.contrib.distillation.distill import DistillConfig, summed_divergence
from cpt.errors import RecipeError
from cpt.hf_internals import IGNORED
from cpt.models.attention import BOUNDS, LONGEST
from cpt.recipe.load import load_recipe


def by_hand(student, teacher, beta, temperature):
    """In probabilities and float64."""
    probabilities = [
        torch.softmax(logits.double() / temperature, -1) for logits in (student, teacher)
    ]
    return jensen_shannon(*probabilities, beta).sum()


@pytest.mark.parametrize(
    ("beta", "temperature"), [(0.0, 1.0), (0.0, 2.0), (0.1, 1.0), (0.9, 2.0), (1.0, 1.0)]
)
def test_value_and_gradient_are_those_of_the_formula(beta, temperature, monkeypatch):
    monkeypatch.setattr("cpt.contrib.distillation.distill.TOKENS_AT_ONCE", 3)
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(10, 17)).requires_grad_(), 2 * torch.randn(10, 17)
    found = summed_divergence(student, teacher, beta=beta, temperature=temperature)
    expected = by_hand(student, teacher, beta, temperature)
    gradients = [torch.autograd.grad(value, student)[0] for value in (found, expected)]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5) and torch.allclose(
        *gradients, atol=1e-6
    )


def test_logits_in_half_precision_are_compared_in_full():
    student, teacher = torch.randn(2, 8, 33, dtype=torch.bfloat16)
    found = summed_divergence(student, teacher, beta=0.0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(by_hand(student, teacher, 0.0, 1.0).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "is_allowed"),
    [
        ("beta", 0, True),
        ("beta", 1, True),
        ("beta", -0.1, False),
        ("beta", 1.1, False),
        ("temperature", 0.1, True),
        ("temperature", 0, False),
    ],
)
def test_beta_is_a_share_and_the_temperature_positive(tmp_path, key, value, is_allowed):
    if is_allowed:
        config = DistillConfig(output_dir=str(tmp_path), use_cpu=True, **{key: value})
        assert vars(config)[key] == value
        return
    with pytest.raises(ValueError, match=f"{key} must be .*, got {value}"):
        DistillConfig(output_dir=str(tmp_path), use_cpu=True, **{key: value})


@pytest.fixture
def student_of(tiny_recipe, tmp_path, tokenizer_folder):
    """The trainer of a student of a wider teacher with random weights."""
    teacher = save_llama(tmp_path / "teacher", tokenizer_folder, 1, hidden_size=48)

    def build(*, steps=8, config=None, stage="distill_text", sections=None, **training):
        keys = {
            "per_device_train_batch_size": 8,
            "teacher_model_name_or_path": str(teacher),
            **training,
        }
        model = tiny_recipe["model"] if config is None else {"from_scratch": True, "config": config}
        changes = {"budget": {"tokens": steps * 512}, **(sections or {})}
        recipe = {**tiny_recipe, "stage": stage, "model": model, "training": keys, **changes}
        return student_trainer(load_recipe(write_recipe(recipe, tmp_path / "r.yaml")))

    return build


def test_packed_documents_learn_what_they_would_learn_alone(student_of):
    trainer = student_of()
    row = next(
        row
        for row in map(trainer.rows.__getitem__, range(20))
        if int((row["position_ids"] == 0).sum()) > 1
    )
    batch = {name: value.unsqueeze(0) for name, value in row.items()}
    starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["position_ids"])]
    documents = [
        {name: value[:, first:last] for name, value in batch.items()}
        for first, last in zip(starts, starts[1:], strict=False)
    ]

    def loss(inputs):
        # over 1 label: a sum, which can be added up
        return trainer.compute_loss(
            trainer.model.train(), inputs, num_items_in_batch=torch.tensor(1.0)
        ).item()

    assert loss(batch) == pytest.approx(sum(map(loss, documents)), rel=1e-5)


def test_experts_of_the_student_are_balanced(student_of):
    shape = {
        **tiny_config("qwen3_moe"),
        "vocab_size": 320,
        "router_aux_loss_coef": 0.5,
        "output_router_logits": True,
    }
    trainer = student_of(config=shape)
    trainer.current_gradient_accumulation_steps = 2  # as the Trainer sets it for each step
    batch = {
        name: torch.stack([trainer.rows[row][name] for row in range(8)]) for name in trainer.rows[0]
    }
    count = torch.tensor(int((batch["labels"][:, 1:] != IGNORED).sum()))
    options = {"return_outputs": True, "num_items_in_batch": count}
    loss, outputs = trainer.compute_loss(trainer.model.train(), dict(batch), **options)
    trainer.model.config.router_aux_loss_coef = 0.0
    bare, _ = trainer.compute_loss(trainer.model, dict(batch), **options)
    assert outputs["aux_loss"] > 0
    assert (loss - bare).item() == pytest.approx(0.5 * outputs["aux_loss"].item() / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("training", "named"),
    [
        ({"beta": 2.0}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"teacher_model_name_or_path": None}, "teacher"),
    ],
)
def test_an_impossible_option_is_refused(student_of, training, named):
    with pytest.raises(RecipeError, match=named):
        student_of(**training)


def test_on_policy_each_step_reads_its_own_prompts_which_processes_share(
    student_of, tmp_path, monkeypatch
):
    words = ["the", "model reads", "a document", "which word", "after", "and learns"] * 8
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": word}) + "\n" for word in words)
    )
    data = {"sequence_length": 32, "sources": [{"path": str(tmp_path / "prompts.jsonl")}]}
    sections = {"data": data, "budget": {"epochs": 2}}
    sizes = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
    }
    trainer = student_of(stage="distill_on_policy", sections=sections, **sizes)
    items = list(trainer.get_train_dataloader())
    assert [len(item) for item in items] == [16] * (2 * trainer.length.steps)
    assert items[0] == items[1] == [trainer.rows[row] for row in range(16)]
    assert items[2] == [trainer.rows[row] for row in range(16, 32)]
    for rank, share in ((0, items[0][:8]), (1, items[0][8:])):
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        monkeypatch.setattr(type(trainer.args), "process_index", rank)
        trainer.model.train()
        assert trainer.inputs_of_process(items[0]) == share
        assert trainer.inputs_of_process({"ids": 3}) == {"ids": 3}, "a batch that was sampled"
        trainer.model.eval()
        assert trainer.inputs_of_process(items[0]) == items[0]


@pytest.mark.parametrize("attention", ["varlen", "eager"])
def test_a_teacher_reads_what_its_attention_needs(attention, student_of, tiny_recipe):
    """Bounds of documents, which it would otherwise have to find, and never labels."""
    model = {**tiny_recipe["model"], "attention": attention}
    trainer, seen = student_of(sections={"model": model}), []

    def teach(**inputs):
        seen.append(inputs)
        raise InterruptedError

    trainer.teacher = teach
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.raises(InterruptedError):
        trainer.compute_loss(trainer.model, dict(batch))
    (inputs,) = seen
    bounds = {BOUNDS, LONGEST} if attention == "varlen" else set()
    others = {"attention_mask"} & batch.keys()
    assert inputs.keys() == {"input_ids", "position_ids", "use_cache", *bounds, *others}
    assert inputs["use_cache"] is False


# --- GKD ---


def gkd(folder, **data):
    """The trainer of the tiny recipe and its tokenizer, with a teacher of random weights."""
    teacher = save_llama(folder / "teacher", TINY / "tokenizer", 1, vocab_size=260)
    training = {"teacher_model_name_or_path": str(teacher), "lmbda": 0.0}
    sections = {
        "base": str(TINY / "gkd.yaml"),
        "output_dir": str(folder),
        "training": training,
        "data": data,
    }
    trainer = student_trainer(load_recipe(write_recipe(sections, folder / "gkd.yaml")))
    return trainer, trainer.processing_class


def test_prompts_of_gkd_end_where_the_answer_begins_and_padding_is_masked(tmp_path):
    trainer, tokenizer = gkd(tmp_path)
    rows = [trainer.rows[number] for number in range(3)]
    batch = trainer.collate_examples()(rows)
    for line, row in enumerate(rows):
        first = int((row["labels"] != IGNORED).long().argmax())
        prompt = batch["prompts"][line][batch["prompt_attention_mask"][line] == 1]
        assert prompt.tolist() == row["input_ids"][:first].tolist()
        assert tokenizer.decode(prompt).endswith("assistant\n")
        positions = [*row["position_ids"].tolist(), 0]
        length = positions.index(0, 1)  # then padding begins
        assert batch["attention_mask"][line].nonzero().flatten().tolist() == [*range(length)]
        whole = batch["input_ids"][line][batch["attention_mask"][line] == 1]
        assert tokenizer.pad_token_id not in whole and tokenizer.decode(whole).rstrip().endswith(
            "<|im_end|>"
        )


def test_gkds_loss_comes_with_its_outputs_where_they_are_asked_for(tmp_path):
    trainer, _ = gkd(tmp_path)
    batch = trainer.collate_examples()([trainer.rows[number] for number in range(3)])
    loss, outputs = trainer.compute_loss(trainer.model.eval(), dict(batch), return_outputs=True)
    assert outputs.logits.shape[:2] == batch["input_ids"].shape
    assert trainer.compute_loss(trainer.model, dict(batch)) == loss


def test_gkd_refuses_rows_of_several_conversations(tmp_path):
    with pytest.raises(RecipeError, match="`data.packing`"):
        gkd(tmp_path, packing="best_fit")
