"""The second gate: sections that contradict each other, each rule shown at its line."""

import pytest

from cpt.recipe.sense import RULES

PINNED = "a" * 40


@pytest.mark.parametrize(
    ("added", "overrides", "said"),
    [
        (
            "stage: cptt\n",
            [],
            "r.yaml:5: no stage called `cptt`. Did you mean `cpt`? Built in: pretrain, cpt, sft, dpo, kto, orpo,",
        ),
        ("stage: grpo\n", [], "stage `grpo` learns from rewards: give `rewards`, as in `rewards: [exact_match]`"),
        (
            "stage: sft\nrewards: [exact_match]\n",
            [],
            "`rewards` has no effect in stage `sft`: it is for grpo, rloo, ppo, spo",
        ),
        (
            "stage: ppo\nrewards: [{name: length, weight: 0}]\n",
            [],
            "`rewards[0].weight` is 0, so it has no effect: remove the reward",
        ),
        ("stage: my_lab:stage\n", [], "r.yaml:5: no stage called `my_lab:stage`."),
        (
            "stage: cpt\n",
            ["model.from_scratch=true"],
            "stage `cpt` continues from trained weights: write `stage: pretrain`, or remove `model.from_scratch`",
        ),
        ("", ["model={attention: sdpa}"], "`model.path` is missing: the weights to start from"),
        (
            "stage: pretrain\ntokenizer: {path: a/b}\n",
            ["model={from_scratch: true}"],
            "new weights need an architecture",
        ),
        (
            "stage: pretrain\ntokenizer: {path: a/b}\n",
            ["model={from_scratch: true, config: {n: 1}}"],
            "`model.config.model_type` is missing",
        ),
        (
            "stage: pretrain\n",
            ["model={from_scratch: true, config: {model_type: llama}}"],
            "`tokenizer.path` is missing: a model from",
        ),
        (
            "stage: pretrain\ntokenizer: {path: c/d}\n",
            ["model={path: a/b, from_scratch: true, config: {model_type: llama}}"],
            "`model.path` has no effect",
        ),
        ("stage: pretrain\n", ["model={path: a/b, from_scratch: true, lora: {}}"], "LoRA adapts trained weights"),
        (
            "stage: pretrain\n",
            ["model={path: a/b, from_scratch: true, hashes: {x: y}}"],
            "`model.hashes` has no effect",
        ),
        ("stage: dpo\ntraining: {beta: 0}\n", [], "r.yaml:6: stage `dpo` learns nothing with `training.beta` 0"),
        (
            "stage: distill\n",
            [],
            "stage `distill` learns from another model: give `training.teacher_model_name_or_path`",
        ),
        (
            "",
            ["model={path: a/b, train_only: new_rows, lora: {}}"],
            "LoRA freezes the embedding that `train_only: new_rows` trains",
        ),
        (
            "stage: pretrain\n",
            ["model={path: a/b, from_scratch: true, train_only: new_rows}"],
            "keeps trained weights, and there are none",
        ),
        ("training: {fsdp: true}\n", ["model.train_only=new_rows"], "FSDP lays parameters end to end"),
        ("", ["model.trust_remote_code=true"], "code that comes with the weights must be pinned"),
        (
            "",
            ["model={path: a/b, trust_remote_code: true, revision: main}"],
            "code that comes with the weights must be pinned",
        ),
        (
            "stage: pretrain\ntokenizer: {path: a/b}\n",
            ["model={from_scratch: true, config: {model_type: llama}, revision: x}"],
            "`model.revision` has no effect without `model.path`",
        ),
        ("", ["model.parameters=5", "model.active_parameters=6"], "must not be more than `model.parameters`"),
        (
            "checkpoints: {every_steps: 1, every_tokens: 1}\n",
            [],
            "give `checkpoints.every_steps` or `checkpoints.every_tokens`, not both",
        ),
        (
            "evaluation: {every_steps: 1, every_tokens: 1, held_out_share: 0.1}\n",
            [],
            "give `evaluation.every_steps` or `evaluation.every_tokens`, not both (`evaluation.every_tokens`: line 5)",
        ),
        ("evaluation: {every_steps: 1}\n", [], "`evaluation.every_steps` has no effect: nothing is held out"),
        ("monitoring: {project: x}\n", [], "`monitoring.project` has no effect without a tracker"),
        ("checkpoints: {keep: 5}\n", [], "`checkpoints.keep` has no effect: only the end is saved"),
        ("checkpoints: {average: 2}\n", [], "`checkpoints.average` needs several: give `checkpoints.every_tokens`"),
        (
            "checkpoints: {average: 4, every_steps: 1}\n",
            [],
            "is 4, but only 3 checkpoints are kept. Raise `checkpoints.keep`",
        ),
        (
            "checkpoints: {average: 2, every_steps: 1}\n",
            ["model.lora=cpt"],
            "the mean of LoRA's factors is not the mean of the models",
        ),
        ("optimizer: {lr: 1}\n", [], "`optimizer.lr` is written as `optimizer.learning_rate`"),
        (
            "optimizer: {adam_beta1: 0.9}\n",
            [],
            "`optimizer.adam_beta1` is written as `optimizer.betas` (a list of both: [0.9, 0.95])",
        ),
        ("schedule: {warmup_steps: 10}\n", [], "`schedule.warmup_steps` is written as `schedule.warmup_tokens`"),
        ("training: {bf16: true, fp16: true}\n", [], "give `training.fp16` or `training.bf16`, not both"),
        (
            "training: {fsdp: true, deepspeed: {zero_optimization: {stage: 2}}}\n",
            [],
            "give `training.fsdp` or `training.deepspeed`, not both",
        ),
    ],
)
def test_a_contradiction_is_told(mistakes, added, overrides, said):
    lines = mistakes(added, *overrides)
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=pretrain"],
        ["stage=pretrain", "model.from_scratch=true"],
        ["stage=pretrain", "model.from_scratch=true", "model.config={model_type: llama}"],
        ["stage=my_lab.stages"],
        ["model.trust_remote_code=true", f"model.revision={PINNED}"],
        ["evaluation.prompts=[Hello]"],
        ["evaluation.every_steps=5", "evaluation.held_out_share=0.1"],
        ["evaluation.every_tokens=5", "evaluation.perplexity=[{path: a/b}]"],
        ["monitoring={trackers: [wandb], project: x}"],
        ["optimizer={name: my_lab.optim:mine, lr: 3}"],
        ["training.bf16=true", "training.fp16=false"],
    ],
)
def test_what_fits_together_passes(load, overrides):
    load("", *overrides)


def test_rules_run_beside_mistakes_in_other_sections(mistakes):
    assert (
        len(mistakes("seed: x\nmonitoring: {project: p}\ntraining: {max_steps: 3}\nstag: cpt\n", "budget.epochs=2"))
        == 5
    )


def test_a_rule_does_not_run_on_a_section_that_is_wrong_itself(mistakes):
    (line,) = mistakes("", "budget={tokens: many}")
    assert "expected a whole number" in line


def test_every_rule_says_what_it_guards():
    assert all(rule.__doc__ for rule in RULES) and len(set(RULES)) == len(RULES)


def test_a_revision_of_no_tokenizer_is_told_beside_the_tokenizer_that_is_missing(mistakes):
    lines = mistakes(
        "stage: pretrain\ntokenizer: {revision: main}\n", "model={from_scratch: true, config: {model_type: llama}}"
    )
    assert (
        "`tokenizer.path` is missing" in lines[0]
        and "`tokenizer.revision` has no effect without `tokenizer.path`" in lines[1]
    )
