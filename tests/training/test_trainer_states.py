import random

import numpy as np
import pytest
import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerControl

from cpt.checkpoints.model_folder import load_data
from cpt.training.saving import progress, random_states, random_states_file, set_random_states


@pytest.fixture
def trainer(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    return Trainer(torch.nn.Linear(1, 1), arguments)


def test_the_trainer_goes_on_with_the_random_numbers_that_were_kept(trainer, tmp_path):
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.save(random_states(trainer), tmp_path / random_states_file(trainer))
    expected = draw()
    trainer._load_rng_state(str(tmp_path))  # transformers reads what cpt writes
    assert draw() == expected
    set_random_states(trainer, load_data(tmp_path / random_states_file(trainer)))
    assert draw() == expected


def test_progress_is_read_back_as_the_trainers_state(trainer, tmp_path):
    trainer.state.global_step = 7
    trainer.state.log_history = [{"step": 7, "loss": 1.5}]
    trainer.control.should_training_stop = True
    (tmp_path / "trainer_state.json").write_text(progress(trainer))
    read = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (read.global_step, read.log_history) == (7, [{"step": 7, "loss": 1.5}])
    assert read.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"] is True
    assert progress(trainer) == progress(trainer) and isinstance(trainer.control, TrainerControl)
