from transformers import TrainerControl, TrainerState

from cpt.monitoring.status_file import StatusFile
from cpt.runs.record import Run


def test_the_status_tells_the_step_and_the_last_checkpoint(tmp_path):
    run = Run(tmp_path)
    status = StatusFile(run)
    status.on_save(None, TrainerState(global_step=4, max_steps=9), TrainerControl())
    assert (run.status()["state"], run.status()["step"], run.status()["checkpoint"]) == ("running", 4, "checkpoint-4")
    status.on_log(None, TrainerState(global_step=5, max_steps=9), TrainerControl())
    assert (run.status()["step"], run.status()["steps"]) == (5, 9)
