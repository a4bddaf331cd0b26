"""The second gate: sections that contradict each other, and settings without effect, each reported with its line."""

import pytest

from cpt.recipe.rules import reported_name
from cpt.recipe.schema import HeldOut, Source

SCRATCH = "stage: pretrain\ntokenizer: {path: a/b}\n"
LLAMA = "{from_scratch: true, config: {model_type: llama}"


EVERY = "checkpoints.every_steps=1"
NEAR = "data.sources[0].replay_kl=0.1"


@pytest.mark.parametrize(
    ("added", "overrides", "named"),
    [
        ("stage: my_lab:stage\n", [], "r.yaml:5: `my_lab:stage`"),
        ("stage: grpo\n", [], "`grpo` `rewards`"),
        ("stage: cpt\n", ["model.from_scratch=true"], "`model.from_scratch` pretrain"),
        ("", ["model={attention: sdpa}"], "`model.path`"),
        (SCRATCH, ["model={from_scratch: true}"], "`model.config` `model.path`"),
        (SCRATCH, ["model={from_scratch: true, config: {n: 1}}"], "`model.config.model_type`"),
        ("stage: pretrain\n", [f"model={LLAMA}}}"], "`tokenizer.path`"),
        (SCRATCH, [f"model={LLAMA}, path: a/b}}"], "`model.path` effect"),
        (SCRATCH, ["model={path: a/b, from_scratch: true, lora: {}}"], "LoRA weights"),
        ("stage: dpo\n", [NEAR], "`data.sources[0].replay_kl` `stage`"),
        ("", [NEAR, "evaluation.held_out_share=0.1"], "`evaluation` replayed domain"),
        (SCRATCH, [f"model={LLAMA}}}", NEAR], "`data.sources[0].replay_kl` `model.from_scratch`"),
        (
            "",
            ["model.resize_embeddings=true", NEAR],
            "`data.sources[0].replay_kl` `model.resize_embeddings`",
        ),
        ("", ["model.train_only=new_rows", NEAR], "`data.sources[0].replay_kl` `model.train_only`"),
        ("", ["model.fused_loss=true", NEAR], "`data.sources[0].replay_kl` `model.fused_loss`"),
        (
            "training: {parallelism_config: {sp_size: 2}}\n",
            [NEAR],
            "replay_kl` `training.parallelism_config`",
        ),
        ("stage: dpo\ntraining: {beta: 0}\n", [], "r.yaml:6: `dpo` `training.beta`"),
        ("stage: distill\n", [], "`distill` `training.teacher_model_name_or_path`"),
        ("", ["model={path: a/b, train_only: new_rows, lora: {}}"], "LoRA new_rows"),
        (SCRATCH, ["model={path: a/b, from_scratch: true, train_only: new_rows}"], "new_rows"),
        ("training: {fsdp: true}\n", ["model.train_only=new_rows"], "FSDP DeepSpeed"),
        ("", ["model={path: a/b, train_only: [lm_head], lora: {}}"], "LoRA `model.train_only`"),
        (
            "training: {gradient_checkpointing: true, gradient_checkpointing_kwargs: {use_reentrant: true}}\n",
            ["model.train_only=[lm_head]"],
            "`model.train_only` use_reentrant `training.gradient_checkpointing_kwargs`",
        ),
        (
            "safety: {loss_guard: null, on_spike: abort}\n",
            [],
            "`safety.on_spike` effect `safety.loss_guard`",
        ),
        (SCRATCH, [f"model={LLAMA}, revision: x}}"], "`model.revision` effect `model.path`"),
        (
            "checkpoints: {every_steps: 1, every_tokens: 1}\n",
            [],
            "`checkpoints.every_steps` every_tokens",
        ),
        (
            "evaluation: {every_steps: 1, every_tokens: 1, held_out_share: 0.1}\n",
            [],
            "`evaluation.every_tokens`: line 5",
        ),
        (
            "evaluation: {every_steps: 1}\n",
            [],
            "`evaluation.every_steps` effect `evaluation.held_out_share`",
        ),
        (
            "evaluation: {tasks_every_tokens: 99}\n",
            [],
            "r.yaml:5: `evaluation.tasks_every_tokens` `evaluation.tasks`",
        ),
        (
            "evaluation: {tasks: [hellaswag], tasks_device: cpu}\n",
            [],
            "`evaluation.tasks_device` effect",
        ),
        ("checkpoints: {keep: 5}\n", [], "`checkpoints.keep` effect `checkpoints.every_tokens`"),
        ("checkpoints: {average: 2}\n", [], "`checkpoints.average` `checkpoints.every_tokens`"),
        ("checkpoints: {average: 4}\n", [EVERY], "`checkpoints.average` `checkpoints.keep`"),
        ("checkpoints: {average: 2}\n", [EVERY, "model.lora=cpt"], "`checkpoints.average` LoRA"),
        ("optimizer: {lr: 1}\n", [], "`optimizer.lr` `optimizer.learning_rate`"),
        ("optimizer: {adam_beta1: 0.9}\n", [], "`optimizer.adam_beta1` `optimizer.betas`"),
        ("schedule: {warmup_steps: 10}\n", [], "`schedule.warmup_steps` `schedule.warmup_tokens`"),
        ("", ["budget={}"], "`budget.tokens` `budget.epochs`"),
        ("", ["data.sources=[{path: a/texts}, {path: b/texts}]"], "`texts` `name`"),
        ("evaluation: {perplexity: [{path: a/b}, {path: c/d, name: b}]}\n", [], "`b` `name`"),
        (
            "evaluation: {held_out_share: 0.1, perplexity: [{path: other/texts}]}\n",
            [],
            "`texts` `name`",
        ),
        (
            "evaluation: {perplexity: [{path: b.jsonl, split: test}]}\n",
            [],
            "`evaluation.perplexity[0].split` effect",
        ),
        ("", ["data.packing=sliding_window"], "`data.stride` 64"),
        (
            "",
            ["data.packing=token_budget"],
            "token_budget `training.per_device_train_batch_size: 1`",
        ),
    ],
)
def test_a_contradiction_is_reported_with_both_sides(mistakes, added, overrides, named):
    (line,) = mistakes(added, *overrides)
    assert all(word in line for word in named.split(" "))


TWO = "data.sources=[{path: a/code}, {path: a/prose}]"
BOTH = "{code: 1, prose: 1}"
LOW = f"{{until_learning_rate: 0.2, weights: {BOTH}}}"


@pytest.mark.parametrize(
    ("phases", "named"),
    [
        (
            "[{weights: {code: 1}}, {until: 5, weights: {prose: 1}}]",
            "`data.phases[0].until` missing",
        ),
        ("[{weights: {code: 1, prose: 1, prosa: 1}}]", "`prosa` `prose`"),
        (
            "[{until: 9, weights: {code: 0}}, {weights: {code: 1, prose: 1}}]",
            "`data.phases[0].weights`",
        ),
        ("[{weights: {code: 1}}]", "`prose` weight"),
        ("[{weights: {code: 1, prose: -1}}]", "`data.phases[0].weights.prose`: 0,"),
        (f"[{{until: 9, change: linear, weights: {BOTH}}}]", "first phase"),
        (
            "[{until: 9, weights: {code: 1}}, {change: linear, weights: {prose: 1}}]",
            "`until` `until_learning_rate`",
        ),
        (
            f"[{{until: 9, until_learning_rate: 0.2, weights: {BOTH}}}]",
            "`data.phases[0].until_learning_rate`",
        ),
        (
            f"[{LOW}, {{until_learning_rate: 0.5, weights: {BOTH}}}]",
            "`data.phases[1].until_learning_rate` 0.2",
        ),
        (f"[{{context_length: 256, weights: {BOTH}}}]", "128"),
    ],
)
def test_phases_that_cannot_be_run_are_reported(mistakes, phases, named):
    (line,) = mistakes("", TWO, f"data.phases={phases}")
    assert all(word in line for word in named.split(" "))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("budget={epochs: 1}", "`data.phases[0].until_learning_rate` `budget.tokens`"),
        ("data.temperature=2", "`data.phases` `data.temperature`"),
    ],
)
def test_phases_need_a_length_in_tokens_and_exclude_a_temperature(mistakes, override, named):
    (line,) = mistakes("", TWO, f"data.phases=[{LOW}]", override)
    assert all(word in line for word in named.split(" "))


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("{path: ./a.jsonl, subset: x}", "subset"),
        ("{path: ./a, streaming: true}", "streaming"),
        ("{path: a.json.zst, data_files: [b]}", "data_files"),
        ("{path: a.txt, text_column: b}", "text_column"),
        ("{path: a.jsonl, text_documents: line}", "text_documents"),
        ("{path: a/b, options: {x: 1}}", "options"),
        ('{path: a.jsonl, template: "{a}", text_column: b}', "template"),
        ("{path: a.jsonl, chat: messages, text_column: b}", "chat"),
        ("{path: a.jsonl, chat: {promt: a, completion: b}}", "prompt"),
        ("{path: a.jsonl, chat: messages, fill_in_the_middle: {}}", "fill_in_the_middle"),
    ],
)
def test_options_of_a_source_without_effect_are_reported(mistakes, source, key):
    (line,) = mistakes("", f"data.sources=[{source}]")
    assert f"`{key}`" in line or f".{key}`" in line


HELD = "perplexity: [{path: a/b, name: code}, {path: a/c, name: prose}]"


@pytest.mark.parametrize(
    ("evaluation", "named"),
    [
        (f"{{{HELD}, retain: {{prosa: null}}}}", "`prosa` `prose` python-prose"),
        ("{retain: {genral: null}}", "`genral` `general`? none"),
        (f"{{{HELD}, retain: [genral, prose]}}", "`genral` `general`?"),
        ("{retain: general}", "`evaluation.retain` domain"),
        (f"{{{HELD}, retain: {{tasks: 0.1}}, every_steps: 5}}", "`evaluation.retain.tasks` null"),
        (f"{{{HELD}, retain: {{prose: null, code: null}}}}", "`evaluation.retain`"),
        (
            f"{{{HELD}, retain: {{prose: 0.02}}}}",
            "`evaluation.retain.prose` `evaluation.every_tokens`",
        ),
        (f"{{{HELD}, retain: {{prose: 0}}, every_steps: 5}}", "`evaluation.retain.prose`: 0,"),
        (f"{{{HELD}, stop: {{set: prose}}}}", "`evaluation.stop` `evaluation.every_tokens`"),
        (f"{{{HELD}, stop: {{set: prosa}}, every_steps: 5}}", "`prosa` `prose`? code, prose"),
        (f"{{{HELD}, stop: {{set: code, patience: 0}}, every_steps: 5}}", "stop.patience` 0"),
        (f"{{{HELD}, stop: {{set: code, margin: -1}}, every_steps: 5}}", "stop.margin` -1"),
    ],
)
def test_sets_of_limits_are_held_out_and_measured(mistakes, evaluation, named):
    (line,) = mistakes(f"evaluation: {evaluation}\n")
    assert all(word in line for word in named.split(" "))


def test_what_refused_callbacks_name_instead_can_be_written(load):
    stop = "evaluation.stop={set: prose, patience: 3}"
    load(f"evaluation: {{{HELD}, every_steps: 5}}\n", stop, "evaluation.prompts=[once]")
    load("", "checkpoints.every_steps=10", "checkpoints.average=2")
    load("stage: grpo\nrewards: [exact_match]\n", "training.log_completions=true")


def test_a_set_without_a_loss_cannot_stop_a_run(mistakes):
    held_out = "evaluation: {held_out_share: 0.1, every_steps: 5, stop: {set: texts}}\n"
    (line,) = mistakes(f"stage: grpo\nrewards: [exact_match]\n{held_out}")
    assert "`evaluation.stop.set`" in line and "`evaluation.perplexity`" in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=pretrain", "model.from_scratch=true"],
        ["stage=my_lab.stage"],
        ["optimizer={name: my_lab.optim:mine, lr: 3}"],
        ["training.bf16=true", "training.fp16=false"],
        ["evaluation.perplexity=[{path: other/texts}]"],
        ["data.packing=token_budget", "training.per_device_train_batch_size=1"],
        [
            "data.sources=[{path: a/b, subset: x, split: test, revision: y, streaming: true, data_files: [x]}]"
        ],
        ["data.sources=[{path: 'lab.data:dump', options: {x: 1}}]"],
        [
            TWO,
            f"data.phases=[{{until: 9, weights: {{code: 1}}}}, {{until: 99, change: linear, weights: {BOTH}}}]",
        ],
        ["evaluation={perplexity: [{path: a/b}, {path: a/c}], retain: {c: 0.02}, every_steps: 5}"],
        [
            "data.sources=[{path: a/b, name: x}, {path: a/c}]",
            "evaluation={held_out_share: 0.1, retain: {x: null}}",
        ],
    ],
)
def test_what_fits_together_passes(load, overrides):
    load("", *overrides)


def test_rules_run_beside_mistakes_in_other_sections_and_not_on_a_section_with_a_mistake(mistakes):
    text = "seed: x\ncheckpoints: {keep: 5}\ntraining: {max_steps: 3}\nstag: cpt\n"
    assert len(mistakes(text, "budget.epochs=2")) == 5
    assert len(mistakes("", "budget={tokens: many}")) == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b/*.txt", "b"),
        ("/a/b/**/c-*.parquet", "b"),
        ("./x.MD", "x"),
        ("x.tar", "x.tar"),
        ("*.txt", "*"),
    ]
    + [
        ("v1.5", "v1.5"),
        ("a/b.jsonl.gz", "b"),
        ("b.tar.gz", "b.tar.gz"),
        ("s3://bucket/c/*.parquet", "c"),
    ],
)
def test_a_source_is_named_after_the_last_part_of_its_path(path, name):
    assert reported_name(Source(path=path)) == name
    assert reported_name(HeldOut(path=path, name="mine")) == "mine"
