"""In what two recipes differ."""

from cpt.recipe.difference import differing_keys


def test_each_differing_key_has_one_line(load):
    after = load(
        "",
        "optimizer.learning_rate=2e-5",
        "data.sources.0.weight=2",
        "training.bf16=true",
        "model.lora={r: 8}",
        "seed=1",
    )
    assert differing_keys(load(), after) == [
        "seed: 42 -> 1",
        "model.lora: null -> {r: 8}",
        "data.sources[0].weight: 1.0 -> 2.0",
        "optimizer.learning_rate: 1e-5 -> 2e-5",
        "training.bf16: not set -> true",
    ]


def test_a_further_source_is_one_line(load):
    (line,) = differing_keys(load(), load("", "data.sources=[{path: some/texts}, {path: a/b}]"))
    assert line.startswith("data.sources[1]: not set -> {path: a/b, ")


def test_who_watches_a_run_does_not_make_it_another(load):
    watched = load(
        "",
        "monitoring.trackers=[wandb]",
        "description=x",
        "tags=[y]",
        "name=z",
        "output_dir=o",
        "training.logging_steps=1",
        "training.dataloader_num_workers=2",
        "training.fsdp=true",
        "training.fsdp_config={cpu_offload: true}",
    )
    assert differing_keys(load(), watched) == []


def test_what_does_not_count_can_be_said(load):
    changed = load("", "seed=1", "optimizer.name=sgd", "optimizer.momentum=0.9")
    assert differing_keys(load(), changed, ignoring=("optimizer",)) == ["seed: 42 -> 1"]
    assert differing_keys(load(), load("", "tags=[a]"), ignoring=()) == ["tags[0]: not set -> a"]
