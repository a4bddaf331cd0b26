import io

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from cpt.training.callbacks import ConsoleProgress, describe_logs


def test_a_training_log_is_one_line_with_its_units():
    line = describe_logs({"loss": 2.5, "learning_rate": 1e-4, "grad_norm": 1.234, "tokens_per_second": 12345.6})
    assert line == "loss 2.5000  learning rate 1.00e-04  gradient norm 1.23  12,346 tokens/s"


def test_an_evaluation_names_each_held_out_set():
    line = describe_logs({"eval_code_loss": 1.0, "eval_code_bits_per_byte": 0.75, "eval_code_tokens": 10})
    assert line == "held out: code 0.7500 bits per byte"


def test_without_a_terminal_each_log_is_a_plain_line():
    out = io.StringIO()
    callback = ConsoleProgress("demo", Console(file=out, width=200))
    state = TrainerState(global_step=0, max_steps=10, is_world_process_zero=True)
    callback.on_train_begin(None, state, TrainerControl())
    state.global_step = 5
    callback.on_log(None, state, TrainerControl(), logs={"loss": 2.0, "learning_rate": 0.1, "seconds_to_go": 5.2})
    assert out.getvalue().startswith("demo  step 5/10  0:05 to go  loss 2.0000")


def test_output_that_finds_no_room_ends_nothing():
    callback = ConsoleProgress("demo", Console(file=open("/dev/full", "w"), width=200))  # noqa: SIM115
    state = TrainerState(global_step=5, max_steps=10, is_world_process_zero=True)
    callback.on_log(None, state, TrainerControl(), logs={"loss": 2.0, "learning_rate": 0.1})
    with pytest.raises(OSError, match="No space left"):
        callback.console.file.flush()
