"""Each thing of the world that a recipe can be wrong about, planted one at a time, then all at once."""

import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe

from cpt.errors import RecipeError
from cpt.planning import gate
from cpt.recipe.load import load_with_places
from cpt.recipe.schema import Recipe

MICRO_BATCH = {"per_device_train_batch_size": 2}
QLORA = {"quantize": "nf4"}
ZERO_3 = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
OFFLOADING = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def mistakes(recipe: Recipe) -> list[str]:
    found = gate.check_reality(recipe)
    return [f"{type(problem).__name__}: {problem}" for problem in (*found.mistakes, *found.blockers)]


def test_a_phase_that_ends_at_a_learning_rate_which_is_never_reached_is_a_mistake(load, tiny_recipe):
    sources = [{"path": source["path"]} for source in tiny_recipe["data"]["sources"]]
    phases = [{"until_learning_rate": 0.2, "weights": {"domain": 1}}, {"weights": {"general": 1}}]
    data = {**tiny_recipe["data"], "sources": sources, "phases": phases}
    assert mistakes(load(data=data)) == []
    (line,) = mistakes(load(data=data, schedule={"name": "constant"}))
    assert "`data.phases[0].until_learning_rate`" in line


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"optimizer": {"name": "adamv"}}, "no optimizer called `adamv`. Did you mean `adamw`?"),
        ({"optimizer": {"name": "adamw", "momentum": 0.9}}, "`optimizer.momentum` is not an option of adamw"),
        ({"optimizer": {"release_gradients": True}}, "Write `training.max_grad_norm: 0`"),
        ({"optimizer": {"name": "adamw", "rounding": "kahan"}}, "`optimizer.rounding`"),
        ({"optimizer": {"rounding": "kahan"}, "training": {**MICRO_BATCH, "deepspeed": OFFLOADING}}, "keeps fp32 weights"),  # noqa: E501
        ({"model": {"path": "./nowhere", "lora": QLORA}, "training": {**MICRO_BATCH, "deepspeed": ZERO_3}}, "ZeRO-3"),
        ({"schedule": {"name": "cosinus"}}, "no schedule called `cosinus`. Did you mean `cosine`?"),
        ({"schedule": {"name": "cosine", "warmup_tokens": 10**9}}, "`schedule.warmup_tokens` is 1,000,000,000"),
        ({"stage": "my_lab.nowhere"}, "cannot import `my_lab.nowhere`"),
        ({"monitoring": {"trackers": ["wandbb"]}}, "no tracker called `wandbb`. Did you mean `wandb`?"),
        ({"monitoring": {"trackers": ["swanlab"]}}, "ResourceError: `monitoring.trackers[0]`: swanlab is not installed"),  # noqa: E501
        ({"model": {"from_scratch": True, "config": {**TINY_LLAMA, "model_type": "lama"}}}, "Did you mean `llama`?"),
        ({"model": {"from_scratch": True, "config": {**TINY_LLAMA, "vocab_size": 300}}}, "has 320 tokens, the model's vocabulary 300"),  # noqa: E501
        ({"model": {"from_scratch": True, "config": TINY_LLAMA, "attention": "sdqa"}}, "model.attention: no `sdqa`"),  # noqa: E501
        ({"model": {"path": "./nowhere"}}, "./nowhere does not exist"),
        ({"output_dir": "/proc/runs"}, "`output_dir`: cannot write to /proc"),
        ({"training": {**MICRO_BATCH, "deepspeed": {"zero_optimization": {"stage": 2}}}}, "`gradient_clipping` is missing"),  # noqa: E501
        ({"training": {**MICRO_BATCH, "parallelism_config": {"sp_size": 2}}}, "parallelism_config"),
        ({"training": {**MICRO_BATCH, "parallelism_config": {"pp_size": 2}}}, "pp_size"),
        ({"checkpoints": {"every_steps": 1, "keep": {"lasst": 2}}}, "`checkpoints.keep.lasst`"),
        ({"checkpoints": {"every_steps": 1, "keep": {"name": "newst"}}}, "Did you mean `newest`?"),
        ({"checkpoints": {"archive": "nowhere://x"}}, "RecipeError: `checkpoints.archive`"),
        ({"checkpoints": {"archive": "adl://x/y"}}, "ResourceError: `checkpoints.archive`"),
        ({"checkpoints": {"archive": "/proc/archive"}}, "RecipeError: `checkpoints.archive`"),
        ({"training": {**MICRO_BATCH, "torch_compile_mode": "fast"}}, "`training.torch_compile_mode`"),
        ({"training": {**MICRO_BATCH, "gradient_checkpointing_kwargs": {"selective": True}}}, "`selective`"),
        ({"training": {**MICRO_BATCH, "torch_compile": True, "deepspeed": ZERO_3}}, "`training.torch_compile`"),
    ],
)  # fmt: skip
def test_one_thing_wrong_is_one_complaint_with_its_remedy(load, sections, complaint):
    found = mistakes(load(**sections))
    assert any(complaint in line for line in found), found


def test_a_held_out_set_of_one_document_is_a_mistake(load, tmp_path):
    (tmp_path / "exam.txt").write_text("One line.\nAnother one.\n")
    held_out = {"path": str(tmp_path / "exam.txt")}
    (line,) = mistakes(load(evaluation={"perplexity": [held_out]}))
    assert "exam.txt holds 1 document(s)" in line and "`text_documents: line`" in line
    assert mistakes(load(evaluation={"perplexity": [{**held_out, "text_documents": "line"}]})) == []


def test_a_domain_set_too_small_for_its_test_is_a_warning(load, corpus):
    held_out = {"path": str(corpus / "held_out.jsonl"), "name": "domain"}
    of_base = {"stage": "cpt", "model": {"path": "./nowhere"}}
    (warning,) = [
        line
        for line in gate.check_reality(load(evaluation={"perplexity": [held_out]}, **of_base)).warnings
        if "perplexity" in line
    ]
    assert "holds 12 document(s)" in warning


def test_a_task_that_there_is_not_is_a_mistake(load, tmp_path):
    task = {"name": "exam", "folder": str(tmp_path / "tasks")}
    (line,) = mistakes(load(evaluation={"tasks": [task]}))
    assert "`evaluation.tasks[0]`: there is no folder" in line
    (line,) = mistakes(load(evaluation={"tasks": [{**task, "limt": 3}]}))
    assert "`evaluation.tasks[0].limt` is not an option" in line and "Did you mean `limit`?" in line
    (line,) = mistakes(load(evaluation={"tasks": [{"name": "domain_test", "questions": "few"}]}))
    assert "`evaluation.tasks[0].questions`: expected a whole number" in line


@pytest.mark.slow
def test_a_model_that_does_not_fit_the_disk_is_refused_by_an_estimate(load):
    shape = {
        **TINY_LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 65536,
        "num_hidden_layers": 900,
        "num_attention_heads": 128,
    }
    found = mistakes(load(model={"from_scratch": True, "config": shape}))
    assert any(line.startswith("ResourceError: `output_dir`") for line in found), found
    without_a_gpu = gate.check_reality(
        load(model={"from_scratch": True, "config": shape}, training={**MICRO_BATCH, "bf16": True})
    )
    assert without_a_gpu.mistakes == [] and any("`output_dir`" in str(blocker) for blocker in without_a_gpu.blockers)


def test_all_mistakes_come_in_one_error_with_their_lines(tiny_recipe, tmp_path):
    sections = {
        **tiny_recipe,
        "optimizer": {"name": "adamv"},
        "schedule": {"name": "cosinus"},
        "output_dir": "/proc/runs",
    }
    path = write_recipe(sections, tmp_path / "recipe.yaml")
    recipe, root = load_with_places(path)
    with pytest.raises(RecipeError) as error:
        gate.refuse_mistakes(recipe, root=root)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    written = path.read_text().splitlines()
    for line, key in zip(lines, ("optimizer", "schedule", "output_dir"), strict=True):
        number = int(line.removeprefix(f"{path}:").split(":")[0])
        assert f"`{key}" in line and written[number - 1].split(":")[0].strip() in (key, "name")


@pytest.mark.parametrize(
    ("sections", "code", "group"),
    [
        ({}, 0, "no mistakes"),
        ({"optimizer": {"name": "adamv"}}, 2, "error: RecipeError"),
        ({"stage": "cpt", "model": {"path": "a/b"}, "tokenizer": {"path": "a/b"}}, 3, "not checked: "),
        ({"monitoring": {"trackers": ["swanlab"]}}, 3, "blocker on this machine: ResourceError"),
        (
            {"optimizer": {"name": "adamv"}, "monitoring": {"trackers": ["swanlab"]}},
            2,
            "blocker on this machine: ResourceError",
        ),
    ],
)
def test_the_report_has_a_line_for_each_finding_and_an_exit_code(load, tmp_path, capsys, sections, code, group):
    assert gate.report(tmp_path / "recipe.yaml", load(**sections)).exit_code == code
    assert group in capsys.readouterr().out


@pytest.mark.parametrize("path", ["./a", "runs/a"])
@pytest.mark.parametrize(
    "key", ["model.path", "tokenizer.path", "training.teacher_model_name_or_path", "data.sources", "rewards"]
)
def test_a_local_path_that_does_not_exist_is_never_taken_for_the_hub(
    load, tiny_recipe, tmp_path, monkeypatch, key, path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    changed = {
        "model.path": {"stage": "cpt", "model": {"path": path}},
        "tokenizer.path": {"tokenizer": {"path": path}},
        "training.teacher_model_name_or_path": {
            "stage": "distill_text",
            "training": {**MICRO_BATCH, "teacher_model_name_or_path": path},
        },
        "data.sources": {"data": {**tiny_recipe["data"], "sources": [{"path": path}]}},
        "rewards": {"stage": "grpo", "rewards": [{"name": "reward_model", "path": path}]},
    }[key]
    found = gate.check_reality(load(**changed))
    assert any(path in str(mistake) and key in str(mistake) for mistake in found.mistakes), found
    assert not any(path in unchecked for unchecked in found.unchecked)


def test_a_result_that_another_run_still_has_to_make_is_a_blocker(load):
    found = gate.check_reality(
        load(stage="cpt", output_dir="elsewhere", model={"path": "elsewhere/base"}, tokenizer={"path": "a/b"})
    )
    assert found.mistakes == [] and found.exit_code == 3
    assert any("elsewhere/base" in str(blocker) for blocker in found.blockers)
    assert not any("elsewhere/base" in unchecked for unchecked in found.unchecked)


def test_a_run_in_bf16_on_a_machine_without_a_gpu_leaves_memory_unchecked(load):
    found = gate.check_reality(load(training={**MICRO_BATCH, "bf16": True}))
    assert (
        torch.accelerator.is_available() or found.exit_code == 3 and any("memory" in line for line in found.unchecked)
    )


def test_sft_on_plain_text_alone_is_a_mistake(load, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("Plain text.")
    (tmp_path / "rows.jsonl").write_text('{"text": "Plain text."}\n')
    (tmp_path / "talks.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )

    def of_paths(*names):
        sources = [{"path": str(tmp_path / name)} for name in names]
        return [
            line
            for line in mistakes(load(stage="sft", data={"sequence_length": 64, "sources": sources}))
            if "sft" in line
        ]

    assert len(of_paths("texts")) == len(of_paths("rows.jsonl")) == len(of_paths("texts", "rows.jsonl")) == 1
    assert of_paths("talks.jsonl") == of_paths("talks.jsonl", "texts") == []


def test_one_huge_document_and_few_held_out_ones_are_warned_of(load, tiny_recipe, tmp_path):
    texts = [f"document {number} " + "x" * 90 for number in range(50)] + ["y" * 9000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {**tiny_recipe["data"], "sources": [{"path": str(tmp_path / "a.jsonl"), "name": "a"}]}
    giant, few = [
        line
        for line in gate.found_in(load(data=data, evaluation={"held_out_share": 0.2})).warnings
        if line.startswith("a: ")
    ]
    assert "a.jsonl:51" in giant and "`evaluation.held_out_share`" in few


def test_a_share_that_holds_nothing_out_is_a_mistake(load):
    found = gate.found_in(load(evaluation={"held_out_share": 1e-9}))
    assert ["held_out_share" in str(mistake) for mistake in found.mistakes] == [True]


def test_a_missing_compiler_is_a_blocker_on_this_machine(load, monkeypatch):
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    found = gate.check_reality(load(training={**MICRO_BATCH, "torch_compile": True}))
    assert found.mistakes == [] and found.exit_code == 3 and "g++" in str(found.blockers[0])
