import json

from transformers import TrainerControl, TrainerState, TrainingArguments

from cpt.monitoring.metrics_file import MetricsFile, keep_lines_until


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_log_becomes_a_line_with_its_tokens(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", tokens_per_step=256)
    state = TrainerState(global_step=3)
    metrics.on_log(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), state, TrainerControl(), logs={"loss": 2.5})
    assert written(tmp_path / "metrics.jsonl") == [{"step": 3, "tokens": 768, "loss": 2.5}]


def test_a_resume_forgets_the_lines_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo')
    keep_lines_until(path, 2)
    assert written(path) == [{"step": 1}, {"step": 2}]


def test_a_fresh_start_keeps_no_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    keep_lines_until(path, 0)
    assert written(path) == []
