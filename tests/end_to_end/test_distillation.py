"""A teacher beside its student, on one process and on two, whole and divided."""

import json

import pytest
from launching import launch, losses, zero_profile
from tiny import write_recipe
from tiny_teachers import save_teacher, texts_of


@pytest.fixture
def losses_of(tiny_recipe, tmp_path, corpus, tokenizer_folder):
    """Losses of a run, started that way; zero is ZeRO's stage, 0 is plain or DDP."""
    teacher = save_teacher(tmp_path / "teacher", tokenizer_folder, texts_of(corpus))

    def run(name, *, processes=1, zero=0, **changes):
        training = {
            **tiny_recipe["training"],
            "teacher_model_name_or_path": str(teacher),
            **changes.pop("training", {}),
        }
        if zero:
            training["deepspeed"] = zero_profile(tmp_path, zero)
        sections = {**tiny_recipe, "stage": "distill_text", **changes, "name": name, "training": training}
        result = launch(
            write_recipe(sections, tmp_path / f"{name}.yaml"),
            way="torchrun" if processes > 1 else "python",
            processes=processes,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return losses(tmp_path / "runs" / name)

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(0, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.long),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
def test_two_processes_have_the_losses_of_one(losses_of, zero):
    alone = losses_of("alone")
    assert len(alone) == 8 and alone[-1] < alone[0]
    assert losses_of("together", processes=2, zero=zero) == pytest.approx(alone, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.long)])
def test_a_student_that_writes_itself_learns_when_divided(losses_of, tmp_path, zero):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"the model {number}"}) + "\n" for number in range(64))
    )
    data = {"sequence_length": 32, "sources": [{"path": str(tmp_path / "prompts.jsonl")}]}
    changes = {
        "stage": "distill_on_policy",
        "data": data,
        "budget": {"epochs": 4},
        "optimizer": {"learning_rate": 1e-2},
    }
    training = {"per_device_train_batch_size": 8, "max_completion_length": 8, "beta": 0.5}
    found = losses_of("written", processes=2, zero=zero, training=training, **changes)
    assert sum(found[-3:]) < sum(found[:3]) / 2
