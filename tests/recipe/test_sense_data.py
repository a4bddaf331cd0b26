"""The rules about sources, mixture and budget, each shown at its line."""

import pytest

from cpt.recipe.schema import HeldOut, Source
from cpt.recipe.sense_data import reported_name

TWO = "data.sources=[{path: a/code}, {path: a/prose}]"


@pytest.mark.parametrize(
    ("added", "overrides", "said"),
    [
        ("", ["budget={}"], "how long to train is missing: give `budget.tokens` or `budget.epochs`"),
        ("", ["budget.epochs=2"], "give `budget.epochs` or `budget.tokens`, not both (`budget.tokens`: r.yaml:4)"),
        (
            "",
            ["data.total_tokens=2_000"],
            "r.yaml:4: `budget.tokens` is 1,000, but the mixture was designed for `data.total_tokens` = 2,000.",
        ),
        (
            "",
            ["data.total_tokens=2_000", "budget={epochs: 1}"],
            "the mixture says how long it is: write `budget.tokens: 2000`",
        ),
        (
            "",
            ["budget.global_batch_tokens=1000"],
            "1,000 tokens do not divide into micro-batches of 8 rows x 128 tokens = 1,024. The next that does: 1024",
        ),
        (
            "training: {per_device_train_batch_size: 3}\n",
            ["budget.global_batch_tokens=1024"],
            "1,024 tokens do not divide into micro-batches of 3 rows x 128 tokens = 384. The next that does: 1152",
        ),
        (
            "training:\n  gradient_accumulation_steps: 4\n",
            ["budget.global_batch_tokens=1024"],
            "r.yaml:6: one knob is set twice: gradient accumulation follows from `budget.global_batch_tokens`.",
        ),
        (
            "",
            ["data.sources=[{path: a/texts}, {path: b/texts}]"],
            "a second `texts`: give this one a `name` of its own",
        ),
        ("", ["data.sources=[{path: a/*.txt}, {path: a/*.jsonl}]"], "a second `a`: give this one a `name`"),
        ("evaluation: {perplexity: [{path: a/b}, {path: c/d, name: b}]}\n", [], "a second `b`: give this one"),
        (
            "evaluation: {held_out_share: 0.1, perplexity: [{path: other/texts}]}\n",
            [],
            "a second `texts`: give this one",
        ),
        ("", ["data.sources=[{path: ./a/*.txt, subset: x}]"], "`subset` has no effect: `./a/*.txt` is a local path"),
        (
            "evaluation: {perplexity: [{path: b.jsonl, split: test}]}\n",
            [],
            "`split` has no effect: `b.jsonl` is a local path",
        ),
        (
            "",
            ["data.packing=sliding_window"],
            "`data.stride` is missing: the tokens from one window to the next, for instance 64",
        ),
        ("", ["data.stride=64"], "`data.stride` has no effect without `packing: sliding_window`"),
        ("", ["data.packing=token_budget"], "a row of `packing: token_budget` is a micro-batch by itself"),
        (
            "training: {per_device_train_batch_size: 2}\n",
            ["data.packing=token_budget"],
            "write `training.per_device_train_batch_size: 1` (`training.per_device_train_batch_size`: r.yaml:5)",
        ),
        (
            "",
            ["data.packing=sliding_window", "data.stride=129"],
            "`data.stride` is more than `data.sequence_length` = 128",
        ),
    ],
)
def test_a_contradiction_is_told(mistakes, added, overrides, said):
    lines = mistakes(added, *overrides)
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (
            "[{until: 9, weights: {code: 1}}, {until: 5, weights: {prose: 1}}]",
            "`data.phases[1].until` is 5: the phase ends before it starts, at 9",
        ),
        (
            "[{until: 9, weights: {code: 1}}, {until: 9, weights: {prose: 1}}]",
            "the phase ends before it starts, at 9 tokens",
        ),
        (
            "[{weights: {code: 1}}, {until: 5, weights: {prose: 1}}]",
            "`data.phases[0].until` is missing: only the last phase",
        ),
        (
            "[{until: 2000, weights: {code: 1}}, {weights: {prose: 1}}]",
            "`data.phases[1]` never begins: the phase before lasts until 2,000",
        ),
        (
            "[{weights: {code: 1, prose: 1, prosa: 1}}]",
            "no source is called `prosa`. Did you mean `prose`? There is: code, prose",
        ),
        (
            "[{until: 9, weights: {code: 0}}, {weights: {code: 1, prose: 1}}]",
            "`data.phases[0].weights`: one source at least needs a weight above 0",
        ),
        ("[{weights: {code: 1}}]", "`prose` is never read: no phase gives it a weight"),
        ("[{weights: {code: 1, prose: -1}}]", "`data.phases[0].weights.prose`: must be at least 0.0, got -1"),
        (
            "[{weights: {code: 1, prose: much}}]",
            '`data.phases[0].weights.prose`: expected a number, got the text "much"',
        ),
        ("[{until: 9, change: linear, weights: {code: 1, prose: 1}}]", "the first phase has nothing to change from"),
        (
            "[{until: 9, weights: {code: 1}}, {change: linear, weights: {prose: 1}}]",
            "a linear change needs an end: give the phase's `until` or `until_learning_rate`",
        ),
        (
            "[{until: 9, until_learning_rate: 0.2, weights: {code: 1}}, {weights: {prose: 1}}]",
            "give `data.phases[0].until_learning_rate` or `until`, not both",
        ),
        (
            "[{until_learning_rate: 0.2, weights: {code: 1}}, {until_learning_rate: 0.5, weights: {prose: 1}}]",
            (
                "`data.phases[1].until_learning_rate` is 0.5, where the learning rate has fallen to 0.2 in an earlier"
                " phase"
            ),
        ),
        ("[{until_learning_rate: 1.5, weights: {code: 1}}, {weights: {prose: 1}}]", "must be less than 1"),
    ],
)
def test_phases_that_cannot_be_run_are_told(mistakes, phases, said):
    lines = mistakes("", TWO, f"data.phases={phases}")
    assert len(lines) == 1 and said in lines[0]


def test_a_phase_that_ends_at_a_learning_rate_needs_a_length_in_tokens(mistakes):
    phases = (
        "data.phases=[{until_learning_rate: 0.2, weights: {code: 1}}, {change: linear, until_learning_rate: 0.1,"
        " weights: {prose: 1}}]"
    )
    lines = mistakes("", TWO, phases, "budget={epochs: 1}")
    assert (
        len(lines) == 2
        and "`data.phases[0].until_learning_rate` needs a run whose length in tokens is known" in lines[0]
    )


def test_a_phase_is_shown_at_its_line(mistakes):
    phases = "  phases:\n  - {until: 9, weights: {code: 1, prose: 1}}\n  - until: 5\n    weights: {code: 1}\n"
    text = (
        "name: x\nmodel: {path: a/b}\nbudget: {tokens: 99}\ndata:\n  sources: [{path: a/code}, {path:"
        f" a/prose}}]\n{phases}"
    )
    (line,) = mistakes(only=text)
    assert line.startswith("r.yaml:8: `data.phases[1].until` is 5") and line.endswith(
        "(`data.phases[0].until`: line 7)"
    )


@pytest.mark.parametrize("instead", ["temperature=2", "phases=[{weights: {code: 1, prose: 1}}]"])
def test_weights_beside_what_decides_them_are_told(mistakes, instead):
    (line,) = mistakes("", "data.sources=[{path: a/code, weight: 2}, {path: a/prose}]", f"data.{instead}")
    assert f"`data.sources[0].weight` has no effect: the weights follow from `data.{instead.split('=')[0]}`" in line


def test_phases_and_temperature_exclude_each_other(mistakes):
    (line,) = mistakes("", TWO, "data.temperature=2", "data.phases=[{weights: {code: 1, prose: 1}}]")
    assert "give `data.phases` or `data.temperature`, not both" in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.total_tokens=1000"],
        ["budget={epochs: 0.5}"],
        ["budget.global_batch_tokens=2048"],
        ["training.gradient_accumulation_steps=4"],
        ["evaluation.perplexity=[{path: other/texts}]"],
        ["data.packing=none"],
        ["data.packing=token_budget", "training.per_device_train_batch_size=1"],
        ["data.sources=[{path: a.jsonl, chat: messages}]", "evaluation.perplexity=[{path: b.jsonl, chat: messages}]"],
        ["data.sources=[{path: a/b, subset: x, split: test, revision: y}]"],
        ["data.temperature=2", "data.when_exhausted=stop"],
        [
            TWO,
            "data.phases=[{until: 9, weights: {code: 1}}, {until: 99, change: linear, weights: {code: 1, prose: 3}}]",
        ],
        [TWO, "data.phases=[{weights: {code: 0.5, prose: 0.5}}]", "budget={epochs: 1}"],
    ],
)
def test_what_fits_together_passes(load, overrides):
    load("", *overrides)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b", "b"),
        ("a/b/", "b"),
        ("a/b/*.txt", "b"),
        ("/a/b/**/c-*.parquet", "b"),
        ("a/b.jsonl", "b"),
        ("./x.MD", "x"),
        ("x.tar", "x.tar"),
        ("*.txt", "*"),
        ("v1.5", "v1.5"),
    ],
)
def test_a_source_is_called_like_the_last_part_of_its_path(path, name):
    assert reported_name(Source(path=path)) == name
    assert reported_name(HeldOut(path=path, name="mine")) == "mine"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{path: ./a, streaming: true}", "`streaming` has no effect: `./a` is a local path"),
        ("{path: a.json.zst, data_files: [b]}", "`data_files` has no effect: `a.json.zst` is a local path"),
        ("{path: a/b, options: {x: 1}}", "`options` are for your own `package.module:function`, not for `a/b`"),
        ('{path: a.jsonl, template: "{a}", text_column: b}', "give `template` or `text_column`, not both"),
        ("{path: a.jsonl, chat: messages, text_column: b}", "give `chat` or `text_column`, not both"),
        ('{path: a.jsonl, chat: messages, template: "{a}"}', "give `chat` or `template`, not both"),
        (
            "{path: a.jsonl, chat: {promt: a, completion: b}}",
            "`chat` knows no part of an example called `promt`. Did you mean `prompt`?",
        ),
        ("{path: a.jsonl, chat: {form: prompt}}", "`chat` knows no part of an example called `form`"),
        ("{path: a.jsonl, chat: messages, fill_in_the_middle: {}}", "`fill_in_the_middle` is not for chats"),
    ],
)
def test_options_of_a_source_that_have_no_effect_are_told(mistakes, source, said):
    (line,) = mistakes("", f"data.sources=[{source}]")
    assert said in line


def test_options_of_a_source_that_have_one_pass(load):
    sources = [
        "{path: a/b, streaming: true, data_files: [x]}",
        "{path: 'lab.data:dump', options: {x: 1}}",
        '{path: c.gz, template: "{a}"}',
    ]
    assert len(load("", f"data.sources=[{', '.join(sources)}]").data.sources) == 3


@pytest.mark.parametrize(
    ("path", "name"), [("a/b.jsonl.gz", "b"), ("b.tar.gz", "b.tar.gz"), ("s3://bucket/c/*.parquet", "c")]
)
def test_compressed_files_and_urls_are_called_like_files(path, name):
    assert reported_name(Source(path=path)) == name
