import json

import pytest
from tiny import write_recipe
from tiny_checkpoints import save_llama

from cpt.cli import main


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["mixture", *map(str, words)])
    return ended.value.code


@pytest.fixture
def probed(tiny_recipe, corpus, tokenizer_folder, tmp_path):
    """A recipe of 96 steps from a base with random weights."""
    sets = [{"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("domain", "general")]
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": str(save_llama(tmp_path / "base", tokenizer_folder, seed=1))},
        "budget": {"tokens": 96 * 256, "global_batch_tokens": 256},
        "evaluation": {"retain": {"general": None}, "perplexity": sets},
    }
    return write_recipe(tiny_recipe, tmp_path / "r.yaml")


def test_a_dry_probe_lists_runs_and_cost_and_starts_nothing(probed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        run(probed, "--probe", "--dry-run", "--shares", "0.1,0.3", "--rates", "1e-3", "--probe-tokens", 24 * 256) == 0
    )
    shown = capsys.readouterr().out
    assert (
        "2 runs of 6,144 tokens (24 steps) and one of 12,288 that is held back: 24,576 tokens, 100% of the recipe's"
        " 24,576" in shown
    )
    assert "Replay (general): 0.1, 0.3 of the tokens" in shown and not (tmp_path / "runs").exists()


def test_a_dry_probe_as_json_is_all_that_is_printed(probed, capsys):
    assert (
        run(probed, "--probe", "--dry-run", "--json", "--shares", "0.1", "--rates", "1e-3", "--probe-tokens", 24 * 256)
        == 0
    )
    listed = json.loads(capsys.readouterr().out)
    assert listed["runs"] == [{"share": 0.1, "rate": 0.001, "tokens": 6144}] and listed["held_back_tokens"] == 12288


def test_options_of_a_probe_need_a_probe(probed, capsys):
    assert run(probed, "--shares", "0.1") == 2
    assert "--shares belong(s) to a probe. Add --probe." in capsys.readouterr().err


@pytest.mark.parametrize("words", ["0.1;0.2", "a lot"])
def test_a_grid_that_is_no_numbers_is_refused(probed, capsys, words):
    assert run(probed, "--probe", "--shares", words) == 2
    assert "--shares takes numbers with commas between them" in capsys.readouterr().err


def test_a_launcher_needs_a_batch_in_tokens(probed, capsys):
    words = (
        "--probe",
        "--dry-run",
        "--launcher",
        "torchrun",
        "--shares",
        "0.1",
        "--rates",
        "1e-3",
        "--probe-tokens",
        24 * 256,
    )
    assert run(probed, "budget.global_batch_tokens=null", "training.gradient_accumulation_steps=2", *words) == 2
    assert "Set `budget.global_batch_tokens`" in capsys.readouterr().err


@pytest.mark.long
def test_a_probe_from_its_runs_to_the_overrides(probed, tmp_path, capsys, monkeypatch):
    """Trains for real; the second time nothing is trained again."""
    monkeypatch.setenv("COLUMNS", "200")
    words = ("--probe", "--shares", "0.1", "--rates", "1e-3,1e-2", "--probe-tokens", 24 * 256)
    assert run(probed, *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "held-back run measured" in shown
        and "Recommended: replay 10.0%" in shown
        and "data.sources.0.weight=0.9" in shown
    )
    folder = tmp_path / "runs" / "tiny-probe"
    assert (folder / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*/final")) and not list(folder.glob("*/checkpoint-*"))
    logs = {path: path.stat().st_mtime_ns for path in folder.glob("*.log")}
    assert len(logs) == 3
    assert run(probed, *words, "--json") == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.log")} == logs
    report = json.loads(capsys.readouterr().out)
    assert report["combinations"][0]["share"] == 0.1 and {check["kind"] for check in report["checks"]} == {
        "domain",
        "general",
    }
