"""The commands around a run: from documents to an answer, comparing, repeating, searching, importing."""

import json
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
import yaml
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt import compare_runs, load_recipe
from cpt.errors import CheckpointError
from cpt.train import train

RECIPES = Path(__file__).parents[2] / "recipes"
PARTS = ("models", "mixtures", "presets", "demo", "pipelines", "search")
SHIPPED = [path for path in sorted(RECIPES.rglob("*.yaml")) if path.relative_to(RECIPES).parts[0] not in PARTS]
COMMANDS = [
    "demo",
    "doctor",
    "init",
    "import",
    "recipes",
    "check",
    "plan",
    "rehearse",
    "schema",
    "mixture",
    "contamination",
    "prepare",
]
COMMANDS += [
    "train",
    "launch",
    "pipeline",
    "search",
    "verdict",
    "evaluate",
    "runs",
    "compare",
    "report",
    "reproduce",
    "verify",
    "export",
]
COMMANDS += ["merge", "serve", "chat"]
BELOW = ["data check", "data preview", "data ingest", "data rewrite", "store list", "store verify", "store prune"]
BELOW += ["tokenizer train", "tokenizer extend", "tokenizer report"]
CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt"
    " %}assistant {% endif %}"
)


def some_of(cases: list, *, quick: tuple) -> list:
    """The quick ones, and the others for slow runs."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(corpus, base_model, tmp_path_factory) -> Path:
    """A finished run of continued pre-training, with a held-out set."""
    folder = tmp_path_factory.mktemp("finished")
    sections = {
        "name": "first",
        "stage": "cpt",
        "output_dir": str(folder / "runs"),
        "model": {"path": str(base_model)},
        "data": {"sequence_length": 64, "sources": [{"path": str(corpus / "domain.jsonl")}]},
        "budget": {"tokens": 6 * 256, "global_batch_tokens": 256},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "held"}]},
        "training": {"per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return train(load_recipe(folder / "recipe.yaml")).parent


@pytest.fixture(scope="module")
def differing(finished) -> Path:
    """The same run with three keys changed."""
    changes = ["name=second", "seed=7", "optimizer.learning_rate=1e-3", "schedule.name=linear"]
    return train(load_recipe(finished.parents[1] / "recipe.yaml", changes)).parent


@pytest.mark.slow
def test_documents_become_an_answer_to_an_openai_client(cpt, start, base_model, corpus, tmp_path):
    """init, check, train, verdict, export, serve."""
    file = tmp_path / "recipe.yaml"
    words = (
        "--model",
        base_model,
        "--gpu",
        "cpu",
        "--general",
        corpus / "general.jsonl",
        "--output",
        file,
        "--tokens",
        2048,
    )
    assert cpt("init", corpus / "domain.jsonl", *words).returncode == 0
    short = ("training.use_cpu=true", f"output_dir={tmp_path / 'runs'}", "name=run")
    assert cpt("check", file, *short).returncode in (0, 3)
    ended = cpt("train", file, *short)
    assert ended.returncode == 0, ended.output
    assert (
        cpt("verdict", tmp_path / "runs/run").returncode == 0
        and (tmp_path / "runs/run/verdict.md").stat().st_size > 500
    )
    assert cpt("export", tmp_path / "runs/run", "--output", tmp_path / "model", "--dtype", "float32").returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start("serve", tmp_path / "model", "--host", "127.0.0.1", "--port", port)
    server.wait_until(lambda: "Ready" in server.output)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model=str(tmp_path / "model"), prompt="the model reads", max_tokens=4, temperature=0
    )
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path / "model"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
    )
    ids = tokenizer("the model reads", return_tensors="pt")
    wanted = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert answer.choices[0].text.strip() == tokenizer.decode(wanted, skip_special_tokens=True).strip()
    server.signal(signal.SIGTERM)
    assert server.wait(60).returncode == 0


def test_compare_names_the_planted_differences_and_no_others(finished, differing):
    found = [one["name"] for one in compare_runs([finished, differing])["differences"] if one["topic"] == "Recipe"]
    assert sorted(found) == ["optimizer.learning_rate", "schedule.name", "seed"]
    assert compare_runs([finished, finished])["differences"] == []


def test_compare_writes_pages_and_json(cpt, finished, differing, tmp_path):
    ended = cpt("compare", finished, differing, "--html", tmp_path / "c.html")
    assert ended.returncode == 0, ended.output
    assert "<html" in (tmp_path / "c.html").read_text() and "schedule.name" in (tmp_path / "c.html").read_text()
    assert json.loads(cpt("compare", finished, differing, "--json").stdout) == compare_runs([finished, differing])


def test_compare_refuses_a_folder_without_a_run(cpt, finished, tmp_path):
    with pytest.raises(CheckpointError):
        compare_runs([finished, tmp_path])
    assert cpt("compare", finished, tmp_path).returncode == 2
    assert cpt("compare", finished).returncode == 2


@pytest.mark.slow
def test_a_run_is_reproduced_bit_for_bit(cpt, finished):
    ended = cpt("reproduce", finished, "--json", folder=Path.cwd())
    assert ended.returncode == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["bit_equal"] and found["weights_differ"] == [] and found["logs"] == 6


@pytest.mark.slow
def test_a_reproduction_finds_a_changed_loss_and_changed_data(cpt, finished, corpus, tmp_path):
    run = shutil.copytree(finished, tmp_path / "runs/first")
    lines = metrics(run)
    next(line for line in lines if line["step"] == 3 and "loss" in line)["loss"] += 1e-12
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = cpt("reproduce", run, "--steps", 4, "--json")
    assert ended.returncode == 3 and not json.loads(ended.stdout)["bit_equal"]
    before = (corpus / "domain.jsonl").read_bytes()
    try:
        (corpus / "domain.jsonl").write_bytes(before.replace(b"model", b"madel", 1))
        ended = cpt("reproduce", run)
        assert ended.returncode == 2 and "domain.jsonl" in ended.stderr
    finally:
        (corpus / "domain.jsonl").write_bytes(before)


def states(folder: Path) -> list[str]:
    files = sorted(folder.glob("trial-*/status.json"))
    return [json.loads(file.read_text()).get("state") for file in files]


@pytest.mark.slow
def test_a_killed_search_is_resumed_and_its_best_recipe_is_the_best_trial(start, cpt, recipe, write, tmp_path):
    space = {"search": {"metric": "loss", "trials": 3, "seed": 1, "pruner": "none"}}
    space |= {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}}
    words = ("search", write(recipe), "--space", write(space, "space.yaml"))
    folder = tmp_path / "runs/run-search"
    search = start(*words)
    search.wait_until(lambda: "finished" in states(folder))
    search.signal(signal.SIGKILL)
    search.wait()
    done = {file: file.stat().st_mtime_ns for file in folder.glob("trial-*/final/model.safetensors")}
    ended = cpt(*words)
    assert ended.returncode == 0, ended.output
    trials = json.loads((folder / "results.json").read_text())["trials"]
    assert len(trials) == 3 and all(
        file.stat().st_mtime_ns == written for file, written in done.items() if file.exists()
    )
    best = min(trials, key=lambda trial: trial["value"])
    assert load_recipe(folder / "best.yaml").optimizer.learning_rate == pytest.approx(
        best["values"]["optimizer.learning_rate"], rel=1e-4
    )


@pytest.mark.slow
def test_a_killed_pipeline_is_resumed_at_its_step(start, cpt, recipe, write, corpus, tmp_path):
    runs = tmp_path / "runs"
    write({**recipe, "name": "one"}, "one.yaml")
    second = {**recipe, "name": "two", "stage": "cpt", "model": {"path": str(runs / "one")}, "tokenizer": {}}
    write(
        {**second, "budget": {"tokens": 60 * 256, "global_batch_tokens": 256}, "checkpoints": {"every_steps": 5}},
        "two.yaml",
    )
    pipeline = write({"name": "both", "steps": [{"recipe": "one.yaml"}, {"recipe": "two.yaml"}]}, "pipeline.yaml")
    first = start("pipeline", pipeline)
    first.wait_until(lambda: (runs / "two/checkpoint-5").exists())
    first.signal(signal.SIGKILL)
    first.wait()
    before = (runs / "one/final/model.safetensors").stat().st_mtime_ns
    ended = cpt("pipeline", pipeline)
    assert ended.returncode == 0, ended.output
    assert (runs / "one/final/model.safetensors").stat().st_mtime_ns == before
    steps = [line["step"] for line in metrics(runs / "two") if "loss" in line]
    assert steps == [*range(1, 61)]


@pytest.mark.parametrize(
    "path", some_of(SHIPPED, quick=(SHIPPED[0], SHIPPED[-1])), ids=lambda path: str(path.relative_to(RECIPES))
)
def test_a_shipped_recipe_passes_check(path, cpt):
    ended = cpt("check", path, "--quick")
    assert ended.returncode == 0, ended.output


def test_shipped_recipes_are_copied_to_where_a_user_works(cpt, tmp_path):
    assert cpt("recipes", "--copy", tmp_path).returncode == 0
    copied = [path.relative_to(tmp_path / "recipes") for path in sorted((tmp_path / "recipes").rglob("*.yaml"))]
    assert {path.relative_to(RECIPES) for path in SHIPPED} <= {*copied}
    assert cpt("check", "recipes/tiny/sft.yaml", "--quick", folder=tmp_path).returncode == 0


@pytest.fixture
def chat_model(base_model, tmp_path) -> Path:
    folder = shutil.copytree(base_model, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def imported_losses(cpt, config: dict, folder: Path) -> list[float]:
    """Import a config, train the recipe in the config's folder, and return the losses."""
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    for words in (
        ("import", "config.yml"),
        ("train", "recipe.yaml", "training.use_cpu=true", "name=run", "output_dir=runs"),
    ):
        ended = cpt(*words, folder=folder)
        assert ended.returncode == 0, ended.output
    return [line["loss"] for line in metrics(folder / "runs/run") if "loss" in line]


@pytest.mark.slow
def test_a_config_of_axolotl_trains(cpt, chat_model, tmp_path):
    alpaca = [{"instruction": f"say {number}", "input": "", "output": f"number {number}"} for number in range(40)]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))
    config = {
        "base_model": "base",
        "datasets": [{"path": "alpaca.json", "type": "alpaca", "ds_type": "json"}],
        "sequence_len": 96,
    }
    config |= {
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "sample_packing": True,
        "micro_batch_size": 2,
    }
    config |= {
        "gradient_accumulation_steps": 1,
        "max_steps": 8,
        "learning_rate": "1e-2",
        "bf16": False,
        "logging_steps": 1,
    }
    found = imported_losses(cpt, {**config, "output_dir": "outputs"}, tmp_path)
    assert len(found) == 8 and found[-1] < found[0] and (tmp_path / "runs/run/final/adapter").is_dir()


@pytest.mark.slow
def test_a_config_of_llamafactory_trains(cpt, chat_model, tmp_path):
    pairs = [
        {"conversations": [{"from": "human", "value": f"say {number}"}]}
        | {
            name: {"from": "gpt", "value": value}
            for name, value in (("chosen", f"number {number}"), ("rejected", "no"))
        }
        for number in range(24)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/pairs.json").write_text(json.dumps(pairs))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {"pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": columns}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    config = {
        "model_name_or_path": "base",
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "pairs",
    }
    config |= {
        "template": "default",
        "cutoff_len": 64,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1.0,
        "learning_rate": 1e-2,
    }
    config |= {"logging_steps": 1, "report_to": "none", "output_dir": "saves/tiny"}
    found = imported_losses(cpt, config, tmp_path)
    assert len(found) == 6 and found[-1] < found[0]


def test_a_report_is_one_html_file_that_needs_no_network(cpt, finished, tmp_path):
    ended = cpt("report", finished, "--output", tmp_path / "report.html")
    assert ended.returncode == 0, ended.output
    page = (tmp_path / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>") and "first" in page and "@import" not in page
    read = re.findall(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=["']?([^"' >]+)""", page)
    assert all(address.startswith("data:") for address in read)


def test_runs_are_listed_filtered_and_sorted(cpt, finished, differing):
    listed = json.loads(cpt("runs", finished.parent, "--json", "--sort", "loss").stdout)
    assert {one["name"] for one in listed} == {"first", "second"} and all(one["state"] == "finished" for one in listed)
    assert [one["loss"] for one in listed] == sorted(one["loss"] for one in listed)
    assert json.loads(cpt("runs", finished.parent, "--json", "--where", "state=running").stdout) == []
    assert cpt("runs", finished.parent, "--where", "stat=running").returncode == 2


def test_the_doctor_names_what_is_installed(cpt):
    ended = cpt("doctor")
    assert ended.returncode == 0, ended.output
    assert all(word in ended.stdout for word in ("torch", "transformers"))


def test_a_trained_tokenizer_gives_every_text_back(cpt, corpus, tmp_path):
    words = ("--text", f"domain={corpus / 'domain.jsonl'}", "--vocabulary", 300, "--output", tmp_path / "made")
    assert cpt("tokenizer", "train", *words).returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    text = "the model\n\treads  „ümläute“ 漢字 🙂 \x00"
    assert len(tokenizer) == 300 and tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert cpt("tokenizer", "train", *words).returncode == 2  # the folder is not empty


def test_a_tokenizer_report_counts_as_by_hand(cpt, tokenizer_folder, corpus):
    ended = cpt("tokenizer", "report", tokenizer_folder, "--text", f"domain={corpus / 'domain.jsonl'}", "--json")
    assert ended.returncode == 0, ended.output
    texts = [json.loads(line)["text"] for line in (corpus / "domain.jsonl").read_text().splitlines()]
    tokens = sum(map(len, AutoTokenizer.from_pretrained(tokenizer_folder)(texts)["input_ids"]))
    numbers = re.findall(r": (\d+\.?\d*)", ended.stdout)
    assert str(tokens) in numbers and str(sum(len(text.encode()) for text in texts)) in numbers


@pytest.mark.slow
def test_a_prepared_recipe_trains_from_the_store_with_the_same_losses(cpt, recipe, write, tmp_path):
    losses = {}
    for name, prepares in (("direct", False), ("prepared", True)):
        file, store = write({**recipe, "name": name}), {"CPT_CACHE": str(tmp_path / name)}
        if prepares:
            assert cpt("prepare", file, environment=store).returncode == 0
            entries = {
                path: path.stat().st_mtime_ns
                for path in (tmp_path / name).rglob("*")
                if path.suffix in (".bin", ".npy", ".idx")
            }
        assert cpt("train", file, environment=store).returncode == 0
        losses[name] = [line["loss"] for line in metrics(tmp_path / "runs" / name) if "loss" in line]
    assert losses["direct"] == losses["prepared"] and len(losses["direct"]) == 8
    assert all(path.stat().st_mtime_ns == written for path, written in entries.items())


def test_a_flipped_bit_in_an_export_or_checkpoint_is_found(cpt, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    assert cpt("verify", run).returncode == 0
    weights = next(run.glob("checkpoint-*/model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert cpt("verify", run).returncode == 2


@pytest.mark.slow
def test_a_rehearsal_does_all_of_a_run_and_leaves_nothing(cpt, recipe, write, tmp_path):
    ended = cpt("rehearse", write(recipe), "--json")
    assert ended.returncode == 0, ended.output
    assert not (tmp_path / "runs").exists() and not [path for path in tmp_path.iterdir() if "rehears" in path.name]


def test_a_rehearsal_of_a_recipe_with_a_mistake_fails(cpt, recipe, write, tmp_path):
    recipe["data"]["sources"][0]["path"] = str(tmp_path / "nowhere.jsonl")
    ended = cpt("rehearse", write(recipe))
    assert ended.returncode == 2 and "nowhere.jsonl" in ended.output and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", some_of([*COMMANDS, *BELOW], quick=("train", "data check")))
def test_a_command_explains_itself(command, cpt):
    ended = cpt(*command.split(), "--help")
    assert ended.returncode == 0 and ended.stderr == ""
    assert "Usage:" in ended.stdout and ("Example" in ended.stdout or command == "schema")


MISTAKES = [
    ("no-such-command",),
    ("train",),
    ("train", "nowhere.yaml"),
    ("plan", "nowhere.yaml"),
    ("check", "nowhere.yaml"),
    ("export", "nowhere", "--output", "x"),
    ("serve", "nowhere"),
    ("verify", "nowhere"),
    ("report", "nowhere"),
    ("reproduce", "nowhere"),
    ("runs", "nowhere"),
    ("import", "nowhere.yml"),
    ("merge", "nowhere", "--method", "lora", "-o", "x"),
    ("tokenizer", "report", "nowhere"),
    ("pipeline", "nowhere.yaml"),
    ("train", "nowhere.yaml", "--no-such-option"),
]


@pytest.mark.parametrize("words", some_of(MISTAKES, quick=(MISTAKES[0], MISTAKES[2], MISTAKES[-1])), ids=" ".join)
def test_a_mistake_on_the_command_line_ends_with_2_and_without_a_traceback(words, cpt, tmp_path):
    ended = cpt(*words, folder=tmp_path)
    assert ended.returncode == 2 and ended.stderr and "Traceback" not in ended.output
    assert not [*tmp_path.iterdir()]


def test_the_schema_is_json_that_knows_every_section(cpt):
    schema = json.loads(cpt("schema").stdout)
    assert {"name", "model", "data", "budget", "optimizer", "training"} <= schema["properties"].keys()


def test_init_writes_a_recipe_that_check_passes(cpt, base_model, corpus, tmp_path):
    words = (
        "--model",
        base_model,
        "--gpu",
        "cpu",
        "--general",
        corpus / "general.jsonl",
        "--output",
        tmp_path / "r.yaml",
    )
    assert cpt("init", corpus / "domain.jsonl", *words).returncode == 0
    assert "#" in (tmp_path / "r.yaml").read_text() and cpt("check", tmp_path / "r.yaml", "--quick").returncode == 0
    assert cpt("init", corpus / "domain.jsonl", *words).returncode == 2, "it does not write over a file"
