import json

from cpt.runs import last_figures as module
from cpt.runs.last_figures import last_figures


def test_the_newest_of_each_figure_is_found_from_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)
    lines = [
        {"step": step, "tokens": 10 * step, "loss": 5 - step / 100, "tokens_per_second": step}
        for step in range(1, 101)
    ]
    lines.insert(
        50, {"step": 50, "tokens": 500, "eval_a_bits_per_byte": 1.5, "eval_b_bits_per_byte": 2.5, "eval_a_loss": 3}
    )
    lines.insert(20, {"step": 20, "tokens": 200, "eval_a_bits_per_byte": 9, "eval_c_bits_per_byte": 9})
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 101, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_figures(tmp_path) == {
        "step": 100,
        "tokens": 1000,
        "loss": 4.0,
        "tokens_per_second": 100,
        "eval_a_bits_per_byte": 1.5,
        "eval_b_bits_per_byte": 2.5,
    }


def test_rubbish_and_no_file_give_what_there_is(tmp_path):
    assert last_figures(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff\xfe\n[1]\n{"step": 3, "loss": NaN, "tokens": 7}\n{"loss": "x"}\n')
    assert last_figures(tmp_path) == {"step": 3, "tokens": 7}
