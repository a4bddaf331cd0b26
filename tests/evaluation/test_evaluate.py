import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_folders import write_lines
from tiny import write_recipe
from tiny_checkpoints import random_llama

from cpt.contrib.tokenizers.train_bpe import train_bpe
from cpt.data.rows.held_out import HeldOutSet
from cpt.errors import CheckpointError, DataError, RecipeError
from cpt.evaluation.domain_test import Question, answer_questions
from cpt.evaluation.evaluate import (
    EvaluationRequest,
    EvaluationResult,
    build_report,
    fit_packing,
    held_out_sets,
    load_for_evaluation,
    measure,
    model_at,
    search_after_training,
    select_text_sets,
    task_metrics,
)
from cpt.evaluation.paired import Difference, DocumentLosses, bits_per_byte_difference
from cpt.evaluation.reports import ScoreReport, SetReport
from cpt.evaluation.sets import EvaluationSet, data_of_recipe, data_of_texts, open_evaluation_sets
from cpt.evaluation.tasks import TaskChoice, TaskScore
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model


@pytest.fixture(scope="module")
def models(corpus, tokenizer, tmp_path_factory):
    """Two models, the second with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("models")
    texts = [
        json.loads(line)["text"] for line in (corpus / "general.jsonl").read_text().splitlines()
    ]
    tokenizer.save_pretrained(folder / "one")
    train_bpe(texts, 290, folder / "two")
    for seed, name in enumerate(("one", "two")):
        random_llama(seed).save_pretrained(folder / name)
    return folder


@pytest.fixture
def held_out(corpus):
    return data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 64)


# Held-out sets


def test_texts_are_the_documents_of_the_rows_in_order(corpus, held_out, tokenizer):
    opened = open_evaluation_sets(held_out, tokenizer)["held"]
    texts = list(opened.texts())
    lines = (corpus / "held_out.jsonl").read_text().splitlines()
    assert [one.text for one in texts] == [json.loads(line)["text"] for line in lines]
    assert texts[2].where == f"{corpus / 'held_out.jsonl'}:3" and opened.rows.num_documents == 12


def test_a_recipes_sets_are_its_files_and_the_shares_of_its_sources(
    corpus, tiny_recipe, tokenizer, tmp_path
):
    further = {"path": str(corpus / "held_out.jsonl"), "name": "further"}
    tiny_recipe["evaluation"] = {"held_out_share": 0.2, "perplexity": [further]}
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    opened = open_evaluation_sets(data_of_recipe(recipe), tokenizer)
    assert set(opened) == {"domain", "general", "further"}
    for of_set in opened.values():
        assert len(list(of_set.texts())) == of_set.rows.num_documents > 5


@pytest.mark.parametrize(("stage", "form"), [("sft", "conversation"), ("cpt", "document")])
def test_a_share_of_examples_is_opened_in_the_form_that_the_stage_trains_on(
    tiny_recipe, tokenizer, tmp_path, stage, form
):
    row = {"user": "{} and {}?", "assistant": "{}."} if stage == "sft" else {"text": "{} {} {}."}
    rows = [{key: text.format(n, n + 1, n * 3) for key, text in row.items()} for n in range(60)]
    write_lines(tmp_path / "rows.jsonl", rows)
    tiny_recipe["stage"] = stage
    tiny_recipe["model"] = {"path": "unused"}
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "rows.jsonl"), "name": "rows"}]
    tiny_recipe["evaluation"] = {"held_out_share": 0.3}
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    (opened,) = open_evaluation_sets(data_of_recipe(recipe), tokenizer).values()
    assert opened.rows.form == form and 5 < opened.rows.num_documents < 40


@pytest.mark.parametrize("text", ["corpus.jsonl", "=x", "domain="])
def test_a_set_without_name_or_path_is_refused(text):
    with pytest.raises(DataError, match="name=path"):
        data_of_texts([text])


def test_two_sets_of_one_name_are_refused(corpus, tokenizer):
    texts = [f"a={corpus / 'held_out.jsonl'}", f"a={corpus / 'domain.jsonl'}"]
    with pytest.raises(DataError, match="`a`"):
        open_evaluation_sets(data_of_texts(texts, 64), tokenizer)


# Models


@pytest.mark.heavy
def test_models_of_different_tokenizers_are_compared_by_document(models, held_out):
    request = EvaluationRequest(held_out)
    one, two = (
        measure(Model(path=str(models / name)), request).losses["held"] for name in ("one", "two")
    )
    assert (
        one.num_tokens.tolist() != two.num_tokens.tolist()
        and one.hashes.tolist() == two.hashes.tolist()
    )
    found = bits_per_byte_difference([one], [two])
    both = [side.metrics()["bits_per_byte"] for side in (one, two)]
    assert found.items == 12 and found.difference == pytest.approx(both[1] - both[0])


@pytest.mark.parametrize("file", ["recipe.yaml", "adapter_config.json"])
def test_an_unfinished_run_and_an_adapter_without_base_are_refused(tmp_path, file):
    (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        model_at(str(tmp_path))


def test_an_adapter_with_its_base_and_a_folder_without_a_config_are_left_to_transformers(tmp_path):
    assert model_at(str(tmp_path)) == Model(path=str(tmp_path))
    for name in ("adapter_config.json", "config.json"):
        (tmp_path / name).write_text("{}")
    assert model_at(str(tmp_path)) == Model(path=str(tmp_path))


@pytest.mark.parametrize("path", ["./nothing", "/no/such/model", "nothing"])
def test_a_model_that_is_not_there_is_refused(path):
    with pytest.raises(CheckpointError, match=path):
        model_at(path)


def test_rows_longer_than_the_model_knows_are_refused(models, corpus):
    request = EvaluationRequest(data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 256))
    with pytest.raises(RecipeError, match="--sequence-length 128"):
        measure(Model(path=str(models / "one")), request)


def test_a_domain_test_needs_a_set_that_is_there(models, held_out):
    with pytest.raises(DataError, match="--domain-test domain.*held"):
        measure(
            Model(path=str(models / "one")), EvaluationRequest(held_out, domain_test=["domain"])
        )


def test_a_domain_test_without_any_set_says_that_there_is_none(models):
    with pytest.raises(DataError, match="Known: none"):
        measure(Model(path=str(models / "one")), EvaluationRequest(domain_test=["domain"]))


def test_sets_of_one_document_are_refused_where_models_are_compared():
    sets = {
        name: EvaluationSet(SimpleNamespace(form=form, num_documents=count), None)
        for name, form, count in (
            ("two", "document", 2),
            ("one", "document", 1),
            ("p", "prompt", 1),
        )
    }
    assert list(select_text_sets(sets, EvaluationRequest())) == ["two", "one"]
    with pytest.raises(DataError, match="`one` has one document"):
        select_text_sets(sets, EvaluationRequest(is_compared=True))
    del sets["one"]
    assert list(select_text_sets(sets, EvaluationRequest(is_compared=True))) == ["two"]
    alone = {"p": sets["p"]}
    for request in (
        EvaluationRequest(tasks=[TaskChoice(("a",))]),
        EvaluationRequest(questions={"a": []}),
    ):
        assert select_text_sets(alone, request) == {}


def test_a_base_is_loaded_with_the_recipes_pins_and_another_model_without_them(models):
    base, run = str(models / "one"), models / "run"
    (run / "final").mkdir(parents=True, exist_ok=True)
    (run / "final" / "config.json").write_text("{}")
    section = Model(
        path=base,
        attention="eager",
        config={"rope_theta": 5.0},
        **{"import": "json"},
        trust_remote_code=True,
        revision="0123abc",
    )
    pins = {"revision": "0123abc", "trust_remote_code": True, "config": {"rope_theta": 5.0}}
    given = {"attention": "eager", "import": "json"}
    assert model_at(base, section) == Model(path=base, **given, **pins)
    assert model_at(str(run), section) == Model(path=str(run / "final"), **given)
    assert model_at(str(models / "two"), section) == Model(path=str(models / "two"), **given)
    assert model_at(base) == Model(path=base)


def test_rows_are_as_long_as_asked_or_as_the_recipe_and_both_models_allow(
    models, corpus, tiny_recipe, tmp_path
):
    texts = [f"held={corpus / 'held_out.jsonl'}"]
    found = [Model(path=str(models / name)) for name in ("one", "two")]
    config = json.loads((models / "two" / "config.json").read_text())
    del config["max_position_embeddings"]
    for name, key in (("short", "max_position_embeddings"), ("gpt2", "n_positions")):
        (tmp_path / name).mkdir()
        model_type = "gpt2" if name == "gpt2" else "llama"
        limits = {"model_type": model_type, key: 48}
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **limits}))
    short, gpt2 = (Model(path=str(tmp_path / name)) for name in ("short", "gpt2"))
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))

    def length(recipe, asked, *models):
        held = held_out_sets(recipe, texts, asked, [*models], None)
        return held.data.sequence_length

    assert length(None, None, *found) == 128 and length(None, None, *found, short) == 48
    assert length(recipe, None, *found) == 64 and length(recipe, None, gpt2) == 48
    assert length(recipe, 96, *found) == 96 and length(None, 32, *found) == 32
    assert held_out_sets(None, [], None, found, None) is None


@pytest.mark.parametrize(
    ("packing", "is_recurrent", "expected"),
    [
        ("best_fit", False, "best_fit"),
        ("best_fit", True, "token_budget"),
        ("sliding_window", True, "token_budget"),
        ("none", True, "none"),
        ("token_budget", True, "token_budget"),
    ],
)
def test_rows_of_several_documents_are_padded_for_a_model_that_cannot_separate_them(
    models, corpus, tmp_path, packing, is_recurrent, expected
):
    """A recurrent model has no limit of positions; rows may be as long as the limit of another one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 32}))
    held = data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 999 if is_recurrent else 128)
    held = replace(held, seed=5, data=held.data.model_copy(update={"packing": packing}))
    fitted = fit_packing(held, Model(path=str(tmp_path if is_recurrent else models / "one")))
    assert fitted.data.packing == expected
    assert fitted.data == held.data.model_copy(update={"packing": expected})
    assert (fitted.evaluation, fitted.seed) == (held.evaluation, 5)


def test_answers_are_those_of_each_kind_with_the_texts_of_their_questions(models, tokenizer):
    """Of a model with 128 positions, which also reads the tokens of the vocabulary as the run's base did."""
    words = ("learns", "domain", "which", "other")
    questions = [
        Question(kind, f"a:{number}", f"{'word ' * 9 * number}the model ", words, number % 4)
        for number, kind in enumerate(["cloze", "continuation", "cloze", "cloze", "continuation"])
    ]
    request = EvaluationRequest(questions={"domain": questions}, batch_size=3)
    found = measure(Model(path=str(models / "one")), request)
    expected = answer_questions(random_llama(0), tokenizer, questions, batch_size=1, longest=128)
    assert found.model == str(models / "one") and found.losses == {} and found.tasks == []
    for kind, numbers in (("cloze", [0, 2, 3]), ("continuation", [1, 4])):
        assert found.answers["domain", kind].tolist() == expected[numbers].tolist()
        texts = [str(questions[number]) for number in numbers]
        assert found.questions["domain", kind] == texts
    assert len(found.answers) == 2


def test_rows_of_new_tokens_are_drawn_by_the_seed_and_the_model_is_ready_to_write(
    models, tokenizer
):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["kinase", "ligase", "amine"])
    model = Model(path=str(models / "one"), resize_embeddings=True)
    first, again, other = (load_for_evaluation(model, larger, None, seed) for seed in (7, 7, 8))
    rows = [one.get_input_embeddings().weight[320:323] for one in (first, again, other)]
    assert rows[0].shape == (3, 32) and rows[0].equal(rows[1]) and not rows[0].equal(rows[2])
    assert first.config.use_cache and not first.training and first.dtype == torch.float32


def test_scores_during_training_are_of_an_adapter_on_its_base_or_of_whole_weights(
    tiny_recipe, tmp_path, monkeypatch
):
    tiny_recipe |= {"stage": "cpt", "model": {"path": "base", "lora": {"r": 4}}, "seed": 7}
    tiny_recipe["evaluation"] = {"tasks": [{"name": "quiz", "limit": 3}], "tasks_every_tokens": 256}
    run = tmp_path / "run"
    for name in ("tasks-2", "tasks-4"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")
    (run / "tasks-2" / "adapter_config.json").write_text("{}")
    write_recipe(tiny_recipe, run / "recipe.yaml")
    reports = [
        ScoreReport("quiz", "acc,none", 0.5, None, 3),
        ScoreReport("math", "exact_match,strict-match", 0.25, None, 3),
        ScoreReport("my_lab.exam:board", "even", 1.0, None, 0),
    ]
    scores = [TaskScore(report, None, ()) for report in reports]
    asked = []

    def note(model, request, **options):
        asked.append((model, request, options))
        return EvaluationResult("m", tasks=scores)

    monkeypatch.setattr("cpt.evaluation.evaluate.measure", note)
    for name in ("tasks-2", "tasks-4"):
        assert task_metrics(run / name) == {
            "task_quiz_acc": 0.5,
            "task_math_exact_match_strict-match": 0.25,
            "task_my_lab.exam_board_even": 1.0,
        }
    request = EvaluationRequest(tasks=[TaskChoice(("quiz",), limit=3)])
    of_adapter = {"adapter": run / "tasks-2", "seed": 7}
    base = Model(path="base")
    assert asked == [(base, request, of_adapter), (Model(path=str(run / "tasks-4")), request, {})]


def test_training_documents_are_searched_where_they_are_files_of_a_size_that_can_be(
    corpus, tiny_recipe, tmp_path, monkeypatch
):
    def search(**evaluation):
        sections = {**tiny_recipe, "evaluation": evaluation}
        return search_after_training(load_recipe(write_recipe(sections, tmp_path / "r.yaml")))

    held = {"perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "mine"}]}
    assert search() is None
    assert search(**held).contamination.evaluated == 12
    sizes = [Path(one["path"]).stat().st_size for one in tiny_recipe["data"]["sources"]]
    monkeypatch.setattr("cpt.evaluation.evaluate.MOST_BYTES_SEARCHED", sum(sizes))
    assert search(**held) is not None
    monkeypatch.setattr("cpt.evaluation.evaluate.MOST_BYTES_SEARCHED", sum(sizes) - 1)
    with pytest.raises(DataError, match="too much to search"):
        search(**held)
    tiny_recipe["data"]["sources"][1] = {"path": "hf://datasets/some/texts", "name": "away"}
    with pytest.raises(DataError, match="not all sources are files"):
        search(**held)


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (
            SetReport("code", 7, 50, 200, 1.5, 4.5, 2.0, 0.405),
            "code: 2.0000 bits per byte, 40.5% of tokens predicted correctly.",
        ),
        (
            ScoreReport("quiz", "acc", 0.5, (0.3, 0.7), 1200),
            "quiz (acc): 0.500 (95 % interval 0.300 to 0.700), 1,200 questions.",
        ),
        (
            ScoreReport("quiz", "loss", 0.5, None, 0, before=0.25),
            "quiz (loss): 0.250 -> 0.500, without an interval.",
        ),
        (
            ScoreReport(
                "quiz", "acc", 0.7, None, 92, against=Difference(0.5, 0.7, 0.2, 0.08, 0.32, 92)
            ),
            "quiz (acc): better: 0.5000 -> 0.7000, +0.2000 (95 % interval +0.0800 to +0.3200, 92 pairs).",
        ),
        (
            ScoreReport(
                "quiz", "loss", 0.7, None, 92, False, Difference(0.5, 0.7, 0.2, 0.08, 0.32, 92)
            ),
            "quiz (loss): worse: 0.5000 -> 0.7000, +0.2000 (95 % interval +0.0800 to +0.3200, 92 pairs).",
        ),
    ],
)
def test_a_line_of_a_report_has_what_was_measured(report, verdict):
    assert report.verdict() == verdict


def test_pairs_are_left_to_the_run_that_measured_them(caplog):
    texts = EvaluationSet(HeldOutSet("a", [], 3), None)
    pairs = EvaluationSet(replace(texts.rows, form="preference"), None)
    with caplog.at_level(logging.INFO, "cpt"):
        assert list(select_text_sets({"texts": texts, "pairs": pairs}, EvaluationRequest())) == [
            "texts"
        ]
    assert "(pairs)" in caplog.text
    with pytest.raises(DataError, match="pairs.*--text"):
        select_text_sets({"pairs": pairs}, EvaluationRequest())


def result(name, bits_per_byte, right, value):
    """Of a model: 40 documents, 40 questions of each kind, and a task of 20 questions."""
    number, sizes = np.arange(40), np.full(40, 1000)
    nats = (bits_per_byte + 0.1 * np.sin(number)) * 1000 * np.log(2)
    losses = DocumentLosses(number.astype(np.uint64), sizes, nats, sizes // 4, sizes // 10)
    answers = {("domain", kind): number % 10 < right for kind in ("cloze", "continuation")}
    by_question = np.arange(20) % 2 < 2 * value
    report = ScoreReport("quiz", "acc,none", value, (value - 0.196, value + 0.196), 20)
    score = TaskScore(report, by_question.astype(float), tuple(map(str, range(20))))
    return EvaluationResult(name, {"domain": losses}, answers, [score])


def test_a_report_compares_each_set_test_and_task_with_the_base():
    alone = build_report(result("m", 2.0, 5, 0.5))
    assert (
        alone.base is None
        and alone.sets[0].against is None
        and alone.sets[0].accuracy == pytest.approx(0.4)
    )
    found = build_report(result("m", 1.8, 7, 1.0), result("b", 2.0, 5, 0.5))
    assert found.sets[0].against.difference == pytest.approx(-0.2)
    assert [one.name for one in found.domain_test] == ["domain cloze", "domain continuation"]
    for one, difference in zip([*found.domain_test, *found.tasks], (0.2, 0.2, 0.5), strict=True):
        assert one.against.difference == pytest.approx(difference) and one.against.low > 0
    assert [line.split(": ")[1] for line in found.verdicts()] == ["better"] * 4


def test_a_set_of_other_documents_is_named(caplog):
    model, base = result("m", 1.8, 7, 1.0), result("b", 2.0, 5, 0.5)
    other = replace(base.losses["domain"], hashes=base.losses["domain"].hashes + 1)
    with pytest.raises(DataError, match="the held-out set `domain`: .* different documents"):
        build_report(model, replace(base, losses={"domain": other}))


def test_a_report_as_json_has_each_number_and_its_verdict():
    report = build_report(result("m", 1.8, 7, 1.0), result("b", 2.0, 5, 0.5))
    content = report.to_json()
    assert (content["model"], content["base"]) == ("m", "b")
    (of_set,) = content["sets"]
    assert (of_set["documents"], of_set["num_bytes"], of_set["tokens"]) == (40, 40_000, 10_000)
    assert of_set["against"]["before"] == report.sets[0].against.before
    cloze, continuation = content["domain_test"]
    assert cloze["name"] == "domain cloze" and continuation["name"] == "domain continuation"
    assert (cloze["value"], cloze["questions"], content["tasks"][0]["value"]) == (0.7, 40, 1.0)
    verdicts = [one["verdict"] for one in (of_set, cloze, continuation, *content["tasks"])]
    assert verdicts == report.verdicts()
    assert (content["tasks"][0]["before"], cloze["transitions"]["chance"]) == (0.5, 0.25)


def test_scores_without_questions_are_shown_next_to_the_base_without_an_interval():
    model = result("m", 1.8, 7, 1.0)
    report = replace(model.tasks[0].report, questions=0, interval=None)
    score, of_base = (TaskScore(replace(report, value=value), None, ()) for value in (1.0, 0.25))
    (found,) = build_report(replace(model, tasks=[score]), replace(model, tasks=[of_base])).tasks
    assert found.against is None and found.before == 0.25 and "0.250 -> " in found.verdict()


# cpt evaluate


@pytest.mark.heavy
@pytest.mark.parametrize("is_run", [True, False])
def test_the_sets_of_a_recipe_are_taken(models, corpus, tiny_recipe, tmp_path, cpt, is_run):
    tiny_recipe["evaluation"] = {
        "perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "mine"}]
    }
    recipe = write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    (tmp_path / "final").symlink_to(models / "one")
    code, said = cpt("evaluate", *([tmp_path] if is_run else [models / "one", "--recipe", recipe]))
    assert code == 0 and "mine: " in said


def test_tasks_need_no_held_out_text(models, tiny_recipe, tmp_path, monkeypatch, cpt):
    (tmp_path / "my_exam.py").write_text(
        "def board(model, tokenizer):\n    return {'even': [1, 0]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tiny_recipe["evaluation"] = {}
    recipe = write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    options = ("--recipe", recipe, "--task", "my_exam:board")
    code, said = cpt("evaluate", models / "one", *options)
    assert code == 0 and "even" in said
    code, said = cpt("evaluate", models / "one", *options, "--domain-test", "a")
    assert code == 2 and "evaluation.held_out_share" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to evaluate"),
        (
            ["--text", "x=/no/such/file.txt"],
            "`--text`",
        ),  # not evaluation.perplexity, as in a recipe
        (["--sequence-length", 64], "--sequence-length"),
        (["--recipe", "no.yaml"], "no.yaml"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(models, options, said, cpt):
    code, printed = cpt("evaluate", models / "one", *options)
    assert code == 2 and said in printed
