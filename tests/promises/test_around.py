"""The commands around a run: from documents to an answer, comparing, repeating, searching, importing."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from promises.conftest import free_port, losses, metrics, texts_in
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt import load_recipe

pytestmark = pytest.mark.heavy
RECIPES = Path(__file__).parents[2] / "recipes"
CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt"
    " %}assistant {% endif %}"
)


@pytest.mark.slow
def test_documents_become_an_answer_to_an_openai_client(cpt, start, base_model, corpus, tmp_path):
    """init, check, train, verdict, export, serve."""
    from openai import OpenAI  # it takes a second

    file = tmp_path / "recipe.yaml"
    words = (*init_words(base_model, corpus), "--tokens", 2048)
    assert cpt("init", *words, "--output", file).returncode == 0
    short = ("training.use_cpu=true", f"output_dir={tmp_path / 'runs'}", "name=run")
    assert cpt("check", file, *short).returncode in (0, 3)
    ended = cpt("train", file, *short)
    assert ended.returncode == 0, ended.output
    assert cpt("verdict", tmp_path / "runs/run").returncode == 0
    assert (tmp_path / "runs/run/verdict.md").stat().st_size > 500
    assert (
        cpt(
            "export", tmp_path / "runs/run", "--output", tmp_path / "model", "--dtype", "float32"
        ).returncode
        == 0
    )
    port = free_port()
    server = start("serve", tmp_path / "model", "--host", "127.0.0.1", "--port", port)
    server.wait_until(lambda: "Ready" in server.output)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    asked = {
        "model": str(tmp_path / "model"),
        "prompt": "the model reads",
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = client.completions.create(**asked)
    model, tokenizer = (
        of.from_pretrained(tmp_path / "model") for of in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer("the model reads", return_tensors="pt")
    wanted = model.generate(**ids, max_new_tokens=4, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert (
        answer.choices[0].text.strip() == tokenizer.decode(wanted, skip_special_tokens=True).strip()
    )
    server.signal(signal.SIGTERM)
    assert server.wait(60).returncode == 0


@pytest.mark.slow
def test_a_run_is_reproduced_bit_for_bit(cpt, run_of, tmp_path):
    ended = cpt("reproduce", run_of(), "--json")
    assert ended.returncode == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["bit_equal"] and found["weights_differ"] == [] and found["logs"] == 8
    other = shutil.copytree(run_of(), tmp_path / "other")
    lines = (other / "metrics.jsonl").read_text()
    changed = re.sub(r'("step": 5, .*?"loss": [\d.]+)\d,', r"\g<1>0,", lines)  # the last digit
    (other / "metrics.jsonl").write_text(changed)
    ended = cpt("reproduce", other, "--json")
    found = json.loads(ended.stdout)
    assert ended.returncode != 0 and not found["bit_equal"] and found["difference"]["step"] == 5


def states(folder: Path) -> list[str]:
    files = sorted(folder.glob("trial-*/status.json"))
    return [json.loads(file.read_text()).get("state") for file in files]


@pytest.mark.slow
def test_a_killed_search_is_resumed_and_its_best_recipe_is_the_best_trial(
    start, cpt, recipe, write, tmp_path
):
    space = {"search": {"metric": "loss", "trials": 2, "seed": 1, "pruner": "none"}}
    space |= {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}}
    words = ("search", write(recipe), "--space", write(space, "space.yaml"))
    folder = tmp_path / "runs/run-search"
    search = start(*words)
    search.wait_until(lambda: "finished" in states(folder))
    search.signal(signal.SIGKILL)
    search.wait()
    done = {
        file: file.stat().st_mtime_ns for file in folder.glob("trial-*/final/model.safetensors")
    }
    ended = cpt(*words)
    assert ended.returncode == 0, ended.output
    trials = json.loads((folder / "results.json").read_text())["trials"]
    assert len(trials) == 2
    assert all(
        file.stat().st_mtime_ns == written for file, written in done.items() if file.exists()
    )
    best = min(trials, key=lambda trial: trial["value"])["values"]["optimizer.learning_rate"]
    assert load_recipe(folder / "best.yaml").optimizer.learning_rate == pytest.approx(
        best, rel=1e-4
    )


@pytest.mark.slow
def test_a_killed_pipeline_is_resumed_at_its_step(start, cpt, recipe, write, corpus, tmp_path):
    runs = tmp_path / "runs"
    write({**recipe, "name": "one"}, "one.yaml")
    second = {
        **recipe,
        "name": "two",
        "stage": "cpt",
        "model": {"path": str(runs / "one")},
        "tokenizer": {},
    }
    second |= {
        "budget": {"tokens": 30 * 256, "global_batch_tokens": 256},
        "checkpoints": {"every_steps": 5},
    }
    write(second, "two.yaml")
    pipeline = write(
        {"name": "both", "steps": [{"recipe": "one.yaml"}, {"recipe": "two.yaml"}]}, "pipeline.yaml"
    )
    first = start("pipeline", pipeline)
    first.wait_until(lambda: (runs / "two/checkpoint-5").exists())
    first.signal(signal.SIGKILL)
    first.wait()
    before = (runs / "one/final/model.safetensors").stat().st_mtime_ns
    ended = cpt("pipeline", pipeline)
    assert ended.returncode == 0, ended.output
    assert (runs / "one/final/model.safetensors").stat().st_mtime_ns == before
    assert [line["step"] for line in metrics(runs / "two")] == [*range(1, 31)]


@pytest.mark.parametrize("name", ["cpt_chemistry.yaml", "tiny/spo.yaml"])
def test_a_shipped_recipe_passes_check(name, cpt):
    ended = cpt("check", RECIPES / name, "--quick")
    assert ended.returncode == 0, ended.output


def test_shipped_recipes_are_copied_to_where_a_user_works(cpt, tmp_path):
    assert cpt("recipes", "--copy", tmp_path).returncode == 0
    copied = [
        path.relative_to(tmp_path / "recipes")
        for path in sorted((tmp_path / "recipes").rglob("*.yaml"))
    ]
    assert copied == [path.relative_to(RECIPES) for path in sorted(RECIPES.rglob("*.yaml"))]
    for path in copied:
        assert (tmp_path / "recipes" / path).read_bytes() == (RECIPES / path).read_bytes(), path
    assert cpt("check", "recipes/tiny/sft.yaml", "--quick", folder=tmp_path).returncode == 0


@pytest.fixture
def chat_model(base_model, tmp_path) -> Path:
    folder = shutil.copytree(base_model, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def imported_losses(cpt, config: dict | str, folder: Path) -> list[float]:
    """Import a config, or a file, train the recipe in its folder, and return the losses."""
    if isinstance(config, dict):
        (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        config = "config.yml"
    short = ("training.use_cpu=true", "name=run", "output_dir=runs")
    for words in (("import", config), ("train", "recipe.yaml", *short)):
        ended = cpt(*words, folder=folder)
        assert ended.returncode == 0, ended.output
    return losses(folder / "runs/run")


@pytest.mark.slow
def test_a_config_of_axolotl_trains(cpt, chat_model, tmp_path):
    alpaca = [
        {"instruction": f"say {number}", "input": "", "output": f"number {number}"}
        for number in range(40)
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))
    config = {
        "base_model": "base",
        "sequence_len": 96,
        "max_steps": 8,
        "learning_rate": "1e-2",
        "logging_steps": 1,
    }
    config |= {
        "datasets": [{"path": "alpaca.json", "type": "alpaca", "ds_type": "json"}],
        "sample_packing": True,
    }
    config |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "bf16": False}
    config |= {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    found = imported_losses(cpt, {**config, "output_dir": "outputs"}, tmp_path)
    assert (
        len(found) == 8 and found[-1] < found[0] and (tmp_path / "runs/run/final/adapter").is_dir()
    )


@pytest.mark.slow
def test_a_config_of_llamafactory_trains(cpt, chat_model, tmp_path):
    chosen, rejected = ({"from": "gpt", "value": value} for value in ("yes", "no"))
    pairs = [
        {
            "conversations": [{"from": "human", "value": f"say {number}"}],
            "chosen": chosen,
            "rejected": rejected,
        }
        for number in range(24)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/pairs.json").write_text(json.dumps(pairs))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "pairs": {
            "file_name": "pairs.json",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": columns,
        }
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    config = {
        "model_name_or_path": "base",
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "full",
    }
    config |= {"dataset": "pairs", "template": "default", "cutoff_len": 64, "report_to": "none"}
    config |= {"per_device_train_batch_size": 4, "num_train_epochs": 1.0, "learning_rate": 1e-2}
    config |= {"logging_steps": 1, "output_dir": "saves/tiny"}
    found = imported_losses(cpt, config, tmp_path)
    assert len(found) == 6 and found[-1] < found[0]


def test_a_trained_tokenizer_gives_every_text_back(cpt, corpus, tmp_path):
    words = (
        "--text",
        f"domain={corpus / 'domain.jsonl'}",
        "--vocabulary",
        300,
        "--output",
        tmp_path / "made",
    )
    assert cpt("tokenizer", "train", *words).returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    text = "the model\n\treads  „ümläute“ 漢字 🙂 \x00"
    assert (
        len(tokenizer) == 300
        and tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    )
    assert cpt("tokenizer", "train", *words).returncode == 2  # the folder is not empty


def test_a_tokenizer_report_counts_as_by_hand(cpt, tokenizer_folder, corpus):
    ended = cpt(
        "tokenizer",
        "report",
        tokenizer_folder,
        "--text",
        f"domain={corpus / 'domain.jsonl'}",
        "--json",
    )
    assert ended.returncode == 0, ended.output
    texts = texts_in(corpus / "domain.jsonl")
    tokens = sum(map(len, AutoTokenizer.from_pretrained(tokenizer_folder)(texts)["input_ids"]))
    (report,) = json.loads(ended.stdout)
    (counted,) = report["texts"]
    words = sum(len(text.split()) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    expected = {"documents": 120, "bytes": size, "words": words, "tokens": tokens}
    assert {name: counted[name] for name in expected} == expected
    assert counted["bytes_per_token"] == pytest.approx(size / tokens)
    assert counted["tokens_per_word"] == pytest.approx(tokens / words)


def test_a_flipped_bit_in_an_export_or_checkpoint_is_found(cpt, run_of, tmp_path):
    run = shutil.copytree(run_of(), tmp_path / "run")
    assert cpt("verify", run).returncode == 0
    for folder in ("final", "checkpoint-8"):
        weights = run / folder / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        found = cpt("verify", run)
        damaged = f"{run / folder}:\n  model.safetensors: hash"
        assert found.returncode == 2 and damaged in found.output, found.output
        weights.write_bytes(content)


@pytest.mark.slow
def test_a_rehearsal_does_all_of_a_run_and_leaves_nothing(cpt, recipe, write, tmp_path, run_of):
    ended = cpt("rehearse", write(recipe), "--json")
    assert ended.returncode == 0, ended.output
    found = json.loads(ended.stdout)
    done = {one["step"]: one["result"] for one in found["findings"] if one["verdict"] == "ok"}
    steps = ("recipe", "longest rows", "first steps", "save", "export", "disk", "resume")
    assert found["passed"] and tuple(done) == steps
    first = ", ".join(f"{loss:.4f}" for loss in losses(run_of())[:4])
    assert first in done["first steps"] and "bit-equal losses" in done["resume"]
    assert not (tmp_path / "runs").exists() and not [
        path for path in tmp_path.iterdir() if "rehears" in path.name
    ]


@pytest.mark.parametrize("command", ["train", "data check"])
def test_a_command_explains_itself(command, cpt):
    ended = cpt(*command.split(), "--help")
    assert ended.returncode == 0 and ended.stderr == ""
    assert "Usage:" in ended.stdout and "Example" in ended.stdout


MISTAKES = """
no-such-command
train nowhere.yaml
train nowhere.yaml --no-such-option
train
train nowhere.yaml --processes 0
plan nowhere.yaml
check nowhere.yaml
export nowhere --output x
serve nowhere
verify nowhere
verdict nowhere
report nowhere
compare nowhere
reproduce nowhere
runs nowhere
import nowhere.yml
merge nowhere --method lora -o x
tokenizer report nowhere
pipeline nowhere.yaml
""".strip().splitlines()


@pytest.mark.parametrize(
    "words",
    [*MISTAKES[:3], *(pytest.param(words, marks=pytest.mark.slow) for words in MISTAKES[3:])],
)
def test_a_mistake_on_the_command_line_ends_with_2_and_without_a_traceback(words, cpt, tmp_path):
    said = {
        "no-such-command": "'no-such-command'",
        "train nowhere.yaml --no-such-option": "--no-such-option",
        "train": "'recipe'",
        "train nowhere.yaml --processes 0": "'--processes'",
        "merge nowhere --method lora -o x": "--method lora",
        "tokenizer report nowhere": "--text",
    }
    ended = cpt(*words.split(), folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr and "Traceback" not in ended.output
    assert said.get(words, "nowhere") in ended.stderr, ended.stderr
    assert not [*tmp_path.iterdir()]


def init_words(base_model: Path, corpus: Path) -> tuple:
    return (
        corpus / "domain.jsonl",
        "--model",
        base_model,
        "--gpu",
        "cpu",
        "--general",
        corpus / "general.jsonl",
    )


def test_init_writes_a_recipe_that_check_passes(cpt, base_model, corpus, tmp_path):
    words, file = init_words(base_model, corpus), tmp_path / "r.yaml"
    assert cpt("init", *words, "--output", file).returncode == 0
    assert "#" in file.read_text() and cpt("check", file, "--quick").returncode == 0
    assert cpt("init", *words, "--output", file).returncode == 2, "it does not write over a file"
