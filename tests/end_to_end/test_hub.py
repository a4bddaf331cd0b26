"""Models, documents and benchmarks by their names on the Hub: the real one (`make test-network`), and one on this
machine that answers as it does."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, losses
from loopback_hub import Client, Hub
from tiny import WORDS, write_documents, write_recipe
from tiny_checkpoints import random_llama, save_llama

from cpt.errors import ResourceError
from cpt.evaluation.tasks import TaskScore, check_tasks, run_tasks, tasks_of_recipe
from cpt.export.write import check_push
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Component, Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer
from cpt.train import train

pytestmark = pytest.mark.heavy
MODEL = "hf-internal-testing/tiny-random-LlamaForCausalLM"
STORIES = "roneneldan/TinyStories"
GPT2, COMMIT = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"
BENCHMARKS = ("mmlu", "hellaswag", "humaneval", "gsm8k")


def from_the_hub(folder, model: str, dataset: str, **revision: str) -> str:
    """The recipe of four steps with a model and streamed documents by their names."""
    source = {"path": dataset, "split": "train", "streaming": True, "max_documents": 100}
    sections: dict[str, Any] = {
        "name": "from-the-hub",
        "output_dir": str(folder / "runs"),
        "model": {"path": model, **revision},
        "data": {"sequence_length": 64, "sources": [source]},
        "budget": {"tokens": 4 * 256, "global_batch_tokens": 256},
        "training": {"per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True},
    }
    return str(write_recipe(sections, folder / "recipe.yaml"))


def scores_of(benchmark: str, tokenizer: Any) -> list[TaskScore]:
    """Two questions of each of its tasks, as an entry of `evaluation.tasks` has them."""
    tasks = [Component(name=benchmark, limit=2, allow_code_execution=benchmark == "humaneval")]
    problems = list(check_tasks(tasks))
    assert problems == [], problems
    choice = tasks_of_recipe(tasks)[0]
    return run_tasks(
        random_llama(vocab_size=len(tokenizer), max_position_embeddings=4096), tokenizer, choice
    )


# --- the Hub itself ---------------------------------------------------------------------------------


@pytest.mark.network
def test_a_model_of_the_hub_trains_on_documents_that_are_streamed_from_it(tmp_path):
    model = train(load_recipe(from_the_hub(tmp_path, MODEL, STORIES, revision="main")))
    assert len(losses(model.parent)) == 4


@pytest.mark.network
def test_a_tokenizer_of_the_hub_is_that_of_its_revision():
    tokenizer = load_tokenizer(Tokenizer(path=GPT2, revision=COMMIT), Model())
    assert tokenizer("Hello world").input_ids == [15496, 995]


@pytest.mark.network
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_benchmark_is_an_entry_of_the_evaluations_tasks(benchmark):
    scores = scores_of(benchmark, load_tokenizer(Tokenizer(path=GPT2, revision=COMMIT), Model()))
    assert scores[0].report.name == benchmark and scores[0].report.questions >= 2


@pytest.mark.network
def test_the_hub_refuses_a_push_with_another_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token_of_anybody")
    with pytest.raises(ResourceError, match="the token is invalid"):
        check_push("owner/name", private=True, sure=True)


# --- a server on this machine -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub
        hub.shutdown()


@pytest.fixture
def client(hub, tmp_path):
    folders = [ROOT, ROOT / "tests", ROOT / "tests/end_to_end"]
    client = Client(hub, tmp_path / "home", PYTHONPATH=os.pathsep.join(map(str, folders)))
    yield client
    client.close()


def test_a_run_takes_the_model_of_a_revision_and_streams_its_documents(
    hub, client, tokenizer_folder, tmp_path
):
    commits = []
    for seed in (1, 2):
        folder = save_llama(tmp_path / f"model-{seed}", tokenizer_folder, seed)
        commits.append(
            hub.commit("lab/tiny", {file.name: file.read_bytes() for file in folder.iterdir()})
        )
    documents = write_documents(tmp_path / "documents.jsonl", 100, seed=0)
    hub.commit("lab/stories", {"data/train.jsonl": documents.read_bytes()})
    recipe = from_the_hub(tmp_path, "lab/tiny", "lab/stories", revision=commits[0])
    imports = "from cpt.recipe.load import load_recipe; from cpt.train import train;"
    model = Path(client(f"{imports} result = str(train(load_recipe({recipe!r})))"))
    assert len(losses(model.parent)) == 4
    snapshots = [
        folder.name for folder in (tmp_path / "home/hub/models--lab--tiny/snapshots").iterdir()
    ]
    assert snapshots == [commits[0]]


@pytest.mark.slow
def test_hellaswag_comes_from_the_hub(hub, client, tokenizer_folder):
    question = {
        "activity_label": WORDS[0],
        "ctx_a": " ".join(WORDS),
        "ctx_b": WORDS[1],
        "endings": WORDS[:4],
    }
    lines = "".join(json.dumps({**question, "label": str(number)}) + "\n" for number in range(4))
    hub.commit(
        "Rowan/hellaswag", {f"data/{split}.jsonl": lines for split in ("train", "validation")}
    )
    code = (
        "from transformers import AutoTokenizer; from test_hub import scores_of;"
        f"scores = scores_of('hellaswag', AutoTokenizer.from_pretrained({str(tokenizer_folder)!r}));"
        "result = [[score.report.metric, score.report.questions] for score in scores]"
    )
    assert client(code) == [["acc,none", 2], ["acc_norm,none", 2]]
