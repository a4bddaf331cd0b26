"""In which keys recipes differ, and which of them may change while a run continues."""

import pytest

from cpt.recipe.keys import all_keys, annotation_at, keys_of, section_in
from cpt.recipe.load import class_of_change, differing_keys, own_class_of_change
from cpt.recipe.schema import CLASSES_OF_CHANGE, Component
from cpt.recipe.tree import dotted


def test_each_differing_key_has_one_line(load):
    changes = [
        "optimizer.learning_rate=2e-5",
        "data.sources.0.weight=2",
        "training.bf16=true",
        "model.lora={r: 8}",
    ]
    assert differing_keys(load(), load("", *changes, "seed=1")) == [
        "seed: 42 -> 1",
        "model.lora: null -> {r: 8}",
        "data.sources[texts].weight: 1.0 -> 2.0",
        "optimizer.learning_rate: 1e-5 -> 2e-5",
        "training.bf16: not set -> true",
    ]


def test_sources_are_compared_by_name_and_a_further_one_is_one_line(load):
    before = load("", "data.sources=[{path: a/b, name: a}, {path: c/d, name: c}]")
    after = load("", "data.sources=[{path: c/d, name: c, weight: 2}, {path: a/b, name: a}]")
    assert differing_keys(before, after) == [
        "data.sources[c].weight: 1.0 -> 2.0",
        "data.sources.order: [[a], [c]] -> [[c], [a]]",
    ]
    (line,) = differing_keys(load(), load("", "data.sources=[{path: some/texts}, {path: a/b}]"))
    assert line == "data.sources[b]: not set -> {path: a/b}"


def test_a_free_change_does_not_make_another_run(load):
    changes = ["monitoring.trackers=[wandb]", "description=x", "tags=[y]", "name=z", "output_dir=o"]
    changes += [
        "checkpoints.every_steps=5",
        "training.logging_steps=1",
        "training.dataloader_num_workers=2",
    ]
    changes += ["training.fsdp=true", "training.fsdp_config={cpu_offload: true}"]
    assert differing_keys(load(), load("", *changes)) == []


def test_every_key_of_the_schema_has_a_class_of_change():
    for location in all_keys():
        *above, key = location
        section = section_in(annotation_at(tuple(above)))
        inherits = key == "name" and issubclass(section, Component)
        assert inherits or own_class_of_change(keys_of(section)[key]), (
            f"{location}: Free, FromStep or Fixed"
        )
        assert class_of_change(dotted(location)) in CLASSES_OF_CHANGE, location


@pytest.mark.parametrize(
    ("expected", "keys"),
    [
        (
            "fixed",
            ["model.path", "model.lora.r", "optimizer.name", "optimizer.betas", "training.bf16"],
        ),
        (
            "fixed",
            ["data.sources[general].path", "evaluation.perplexity[general].path", "data.packing"],
        ),
        (
            "from_step",
            ["data.sources[general]", "data.sources[general].weight", "data.sources.0.weight"],
        ),
        (
            "from_step",
            ["optimizer.learning_rate", "optimizer.embedding_learning_rate", "schedule.floor"],
        ),
        (
            "from_step",
            ["training.max_grad_norm", "budget.tokens", "evaluation.perplexity[general]"],
        ),
        ("free", ["checkpoints.keep.last", "training.logging_steps", "evaluation.tasks[0].limit"]),
    ],
)
def test_options_and_keys_of_hugging_face_have_a_class_of_change(expected, keys):
    assert {class_of_change(key) for key in keys} == {expected}
