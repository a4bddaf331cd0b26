import json

from full_disk import disk_of_its_own, fill
from transformers import TrainerControl, TrainerState, TrainingArguments

from cpt.runs.record import Run
from cpt.training.callbacks import SECONDS_BETWEEN_WRITES, MetricsFile, StatusFile


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_log_becomes_a_line_with_its_tokens(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", tokens_per_step=256)
    state = TrainerState(global_step=3)
    metrics.on_log(
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True), state, TrainerControl(), logs={"loss": 2.5}
    )
    assert written(tmp_path / "metrics.jsonl") == [{"step": 3, "tokens": 768, "loss": 2.5}]


def test_a_start_forgets_the_lines_after_its_checkpoint_and_a_fresh_one_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3, 4)) + '{"step": 5, "lo')
    metrics = MetricsFile(path, tokens_per_step=256)
    metrics.on_train_begin(TrainingArguments(), TrainerState(global_step=2), TrainerControl())
    assert written(path) == [{"step": 0}, {"step": 1}, {"step": 2}]
    metrics.on_train_begin(TrainingArguments(), TrainerState(), TrainerControl())
    assert written(path) == []


def test_what_a_full_disk_keeps_out_comes_with_the_next_step(tmp_path):
    with disk_of_its_own(tmp_path / "disk", "64k") as disk:
        metrics = MetricsFile(disk / "metrics.jsonl", tokens_per_step=256)
        ballast = fill(disk)
        for step in (1, 2, 3):
            metrics.on_log(None, TrainerState(global_step=step), TrainerControl(), logs={"loss": 2.5})
            metrics.on_step_end(None, TrainerState(global_step=step), TrainerControl())
        # the run resumes at step 2: the third line is not to come
        metrics.on_train_begin(TrainingArguments(), TrainerState(global_step=2), TrainerControl())
        ballast.unlink()
        metrics.on_step_end(None, TrainerState(global_step=3), TrainerControl())
        assert [line["step"] for line in written(metrics.path)] == [1, 2]


def test_the_status_tells_the_step_and_the_last_checkpoint(tmp_path):
    run = Run(tmp_path)
    status = StatusFile(run)
    status.on_save(None, TrainerState(global_step=3, max_steps=9), TrainerControl())
    assert "checkpoint" not in run.status(), "the save failed"
    (tmp_path / "checkpoint-4").mkdir()
    status.on_save(None, TrainerState(global_step=4, max_steps=9), TrainerControl())
    assert (run.status()["state"], run.status()["step"], run.status()["checkpoint"]) == ("running", 4, "checkpoint-4")
    status.on_log(None, TrainerState(global_step=5, max_steps=9), TrainerControl())
    assert run.status()["step"] == 4, "a second is not over"
    status.written -= SECONDS_BETWEEN_WRITES
    status.on_log(None, TrainerState(global_step=5, max_steps=9), TrainerControl())
    assert (run.status()["step"], run.status()["steps"]) == (5, 9)
