"""Each thing of the world that a recipe can be wrong about, planted one at a time, then all together."""

import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import Gpu
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta
from cpt.planning import gate
from cpt.planning.check_resources import PreflightReport
from cpt.recipe.load import load_with_tree
from cpt.recipe.schema import Recipe

MICRO_BATCH = {"per_device_train_batch_size": 2}
QLORA = {"quantize": "nf4"}
ZERO_2 = {"zero_optimization": {"stage": 2}}
CLIPS = {"gradient_clipping": 0.5}
ZERO_3 = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
OFFLOADING = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def mistakes(recipe: Recipe) -> list[str]:
    found = gate.check_reality(recipe)
    return [
        f"{type(problem).__name__}: {problem}" for problem in (*found.mistakes, *found.blockers)
    ]


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"optimizer": {"name": "adamv"}}, "Did you mean `adamw`?"),
        ({"optimizer": {"release_gradients": True}}, "`training.max_grad_norm: 0`"),
        ({"optimizer": {"rounding": "kahan"}}, "needs bfloat16 weights"),
        (
            {
                "optimizer": {"rounding": "kahan"},
                "training": {**MICRO_BATCH, "deepspeed": OFFLOADING},
            },
            "fp32 weights",
        ),
        (
            {
                "model": {"path": "./nowhere", "lora": QLORA},
                "training": {**MICRO_BATCH, "deepspeed": ZERO_3},
            },
            "ZeRO-3",
        ),
        ({"schedule": {"name": "cosinus"}}, "Did you mean `cosine`?"),
        ({"stage": "my_lab.nowhere"}, "`my_lab.nowhere`"),
        (
            {"stage": "dpo", "training": {**MICRO_BATCH, "activation_offloading": True}},
            "`training.activation_offloading` needs a GPU",
        ),
        (
            {
                "stage": "grpo",
                "rewards": ["exact_match"],
                "training": {"gradient_accumulation_steps": 3, **MICRO_BATCH},
                "budget": {"tokens": 1000},
            },
            "`training.gradient_accumulation_steps: 4`, or `training.num_generations: 6`",
        ),
        (
            {"evaluation": {"tasks": [{"name": "exam", "folder": "./nowhere"}]}},
            "`evaluation.tasks[0]`",
        ),
        ({"monitoring": {"trackers": ["wandbb"]}}, "Did you mean `wandb`?"),
        ({"monitoring": {"trackers": ["swanlab"]}}, "ResourceError: `monitoring.trackers[0]`"),
        (
            {"model": {"from_scratch": True, "config": {**TINY_LLAMA, "model_type": "lama"}}},
            "Did you mean `llama`?",
        ),
        (
            {"model": {"from_scratch": True, "config": {**TINY_LLAMA, "vocab_size": 300}}},
            "ids up to 319",
        ),
        (
            {"model": {"from_scratch": True, "config": TINY_LLAMA, "attention": "sdqa"}},
            "model.attention",
        ),
        ({"output_dir": "/proc/runs"}, "`output_dir`"),
        ({"training": {**MICRO_BATCH, "deepspeed": ZERO_2 | CLIPS}}, "`gradient_clipping`"),
        ({"training": {**MICRO_BATCH, "parallelism_config": {"sp_size": 2}}}, "parallelism_config"),
        ({"checkpoints": {"every_steps": 1, "keep": {"lasst": 2}}}, "`checkpoints.keep.lasst`"),
        ({"safety": {"on_spike": "abrot"}}, "`safety.on_spike.name`"),
        ({"safety": {"on_oom": "abrot"}}, "`safety.on_oom.name`"),
        ({"checkpoints": {"archive": "nowhere://x"}}, "RecipeError: `checkpoints.archive`"),
        ({"checkpoints": {"archive": "adl://x/y"}}, "ResourceError: `checkpoints.archive`"),
        (
            {"training": {**MICRO_BATCH, "torch_compile_mode": "fast"}},
            "`training.torch_compile_mode`",
        ),
        (
            {"training": {**MICRO_BATCH, "gradient_checkpointing_kwargs": {"selective": True}}},
            "`selective`",
        ),
        (
            {"training": {**MICRO_BATCH, "torch_compile": True, "deepspeed": ZERO_3}},
            "`training.torch_compile`",
        ),
    ],
)
def test_one_mistake_is_reported_with_its_key_or_remedy(load, sections, complaint):
    found = mistakes(load(**sections))
    assert [complaint in line for line in found].count(True) == 1, found
    # the stage's columns and the model that is not there are mistakes of their own
    own = ("no column", "my_lab", "./nowhere", complaint)
    assert [line for line in found if not any(words in line for words in own)] == []


def test_a_sound_recipe_has_no_findings_and_its_plan_of_a_gpu_is_none(load):
    found = gate.check_reality(load(evaluation={"held_out_share": 0.2}))
    assert (found.mistakes, found.blockers, found.unchecked, found.warnings) == ([], [], [], [])
    assert found.exit_code == 0 and len(found.tokenizer) == 320
    found = gate.check_recipe(load(evaluation={"held_out_share": 0.2}))
    assert [account.tokens is not None for account in found.accounts] and found.exit_code == 0


def test_a_run_is_refused_with_all_mistakes_in_their_class_and_with_their_lines(
    load, tiny_recipe, tmp_path
):
    recipe = load()
    assert gate.refuse_mistakes(recipe).exit_code == 0
    with pytest.raises(RecipeError, match="`gradient_clipping`"):
        gate.refuse_mistakes(recipe, deepspeed=ZERO_2 | CLIPS)
    with pytest.raises(ResourceError, match=r"monitoring.trackers\[0\].*\n.*trackers\[1\]"):
        gate.refuse_mistakes(load(monitoring={"trackers": ["swanlab", "swanlab"]}))
    both = {"optimizer": {"name": "adamv"}, "monitoring": {"trackers": ["swanlab"]}}
    path = write_recipe({**tiny_recipe, **both}, tmp_path / "both.yaml")
    recipe, root = load_with_tree(path)
    with pytest.raises(RecipeError) as refused:
        gate.refuse_mistakes(recipe, root=root)
    lines = str(refused.value).splitlines()
    written = path.read_text().splitlines()
    places = [written.index("  name: adamv") + 1, written.index("  - swanlab") + 1]
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{place}" for place in places]


@pytest.mark.parametrize(
    ("sections", "code", "group"),
    [
        ({}, 0, "no mistakes"),
        ({"optimizer": {"name": "adamv"}}, 2, "error: RecipeError"),
        (
            {"stage": "cpt", "model": {"path": "a/b"}, "tokenizer": {"path": "a/b"}},
            3,
            "not checked: ",
        ),
        ({"monitoring": {"trackers": ["swanlab"]}}, 3, "blocker on this machine: ResourceError"),
        (
            {"optimizer": {"name": "adamv"}, "monitoring": {"trackers": ["swanlab"]}},
            2,
            "blocker on this machine",
        ),
    ],
)
def test_the_report_has_a_line_for_each_finding_and_an_exit_code(
    load, tmp_path, capsys, sections, code, group
):
    assert gate.print_report(tmp_path / "recipe.yaml", load(**sections)).exit_code == code
    assert group in capsys.readouterr().out


# --- documents and other files ------------------------------------------------------------------------------------


def test_a_held_out_set_of_one_document_is_a_mistake(load, tmp_path):
    (tmp_path / "exam.txt").write_text("One line.\nAnother one.\n")
    held_out = {"path": str(tmp_path / "exam.txt")}
    (line,) = mistakes(load(evaluation={"perplexity": [held_out]}))
    assert "exam.txt" in line and "`text_documents: line`" in line
    assert mistakes(load(evaluation={"perplexity": [{**held_out, "text_documents": "line"}]})) == []


def test_a_held_out_set_too_small_for_its_test_is_a_warning(load, corpus):
    held_out = {"path": str(corpus / "held_out.jsonl"), "name": "domain"}
    recipe = load(evaluation={"perplexity": [held_out]}, stage="cpt", model={"path": "./nowhere"})
    (warning,) = [line for line in gate.check_reality(recipe).warnings if "perplexity" in line]
    assert "12 document(s)" in warning


@pytest.mark.parametrize(
    ("key", "path"),
    [("model.path", "./a"), ("training.teacher_model_name_or_path", "./a")]
    + [(key, "runs/a") for key in ("model.path", "tokenizer.path", "data.sources", "rewards")],
)
def test_a_local_path_that_does_not_exist_is_never_taken_for_the_hub(load, tiny_recipe, key, path):
    teacher = {**MICRO_BATCH, "teacher_model_name_or_path": path}
    changed = {
        "model.path": {"stage": "cpt", "model": {"path": path}},
        "tokenizer.path": {"tokenizer": {"path": path}},
        "training.teacher_model_name_or_path": {"stage": "distill_text", "training": teacher},
        "data.sources": {"data": {**tiny_recipe["data"], "sources": [{"path": path}]}},
        "rewards": {"stage": "grpo", "rewards": [{"name": "reward_model", "path": path}]},
    }
    found = gate.check_reality(load(**changed[key]))
    assert any(path in str(mistake) and key in str(mistake) for mistake in found.mistakes), found
    assert not any(path in unchecked for unchecked in found.unchecked)


def test_a_result_that_another_run_still_has_to_make_is_a_blocker(load):
    base = {"stage": "cpt", "output_dir": "elsewhere", "model": {"path": "elsewhere/base"}}
    found = gate.check_reality(load(**base, tokenizer={"path": "a/b"}))
    assert found.mistakes == [] and found.exit_code == 3
    assert any("elsewhere/base" in str(blocker) for blocker in found.blockers)
    assert not any("elsewhere/base" in unchecked for unchecked in found.unchecked)


def test_sft_on_plain_text_alone_is_a_mistake(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "Plain text."}\n')
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")

    def about_sft(*names):
        sources = [{"path": str(tmp_path / name)} for name in names]
        found = mistakes(load(stage="sft", data={"sequence_length": 64, "sources": sources}))
        return [line for line in found if "sft" in line]

    assert len(about_sft("rows.jsonl")) == 1
    assert about_sft("talks.jsonl") == about_sft("talks.jsonl", "rows.jsonl") == []


def test_a_share_that_holds_nothing_out_is_a_mistake(load):
    found = gate.check_recipe(load(evaluation={"held_out_share": 1e-9}))
    assert ["held_out_share" in str(mistake) for mistake in found.mistakes] == [True]


# --- this machine -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without a GPU")
def test_a_word_of_retain_is_named_when_the_hub_cannot_be_reached(load, monkeypatch):
    monkeypatch.setattr(gate, "hub_is_reachable", lambda: False)
    found = gate.check_reality(load(evaluation={"held_out_share": 0.2, "retain": "code"}))
    (line,) = (line for line in found.unchecked if "evaluation" in line)
    assert found.exit_code == 3 and all(
        word in line for word in ("humaneval", "retain: code", "`python-prose`")
    )


def test_without_a_gpu_the_memory_of_a_run_in_bf16_is_unchecked(load):
    found = gate.check_reality(load(training={**MICRO_BATCH, "bf16": True}))
    assert found.exit_code == 3 and any("memory" in line for line in found.unchecked)


def test_a_limit_of_gpu_memory_on_a_cpu_is_a_warning(load):
    found = gate.check_reality(
        load(safety={"max_gpu_memory": 0.8}, training={**MICRO_BATCH, "use_cpu": True})
    )
    assert any("safety.max_gpu_memory" in warning for warning in found.warnings)


def test_a_recipe_for_one_gpu_is_checked_for_the_processes_of_this_run(load, monkeypatch):
    monkeypatch.setattr(gate, "world_size", lambda: 3)
    (mistake,) = mistakes(load())  # 4 rows a step
    assert "`budget.global_batch_tokens`" in mistake
    monkeypatch.setattr(gate, "world_size", lambda: 2)
    assert mistakes(load()) == []


def test_triton_is_tried_only_if_the_run_uses_the_gpu(load, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(gate, "ask_triton", lambda: asked.append(1))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with_cpu = load(training={**MICRO_BATCH, "use_cpu": True})
    without = load()
    gate.print_report(tmp_path / "recipe.yaml", with_cpu)
    assert asked == []
    gate.print_report(tmp_path / "recipe.yaml", without)
    assert asked == [1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gate.print_report(tmp_path / "recipe.yaml", without)
    assert asked == [1]


LIGER = {**MICRO_BATCH, "use_liger_kernel": True}


@pytest.mark.parametrize(
    ("training", "is_installed", "blockers"),
    [
        ({**LIGER, "bf16": True}, False, ["pip install liger-kernel"]),
        ({**LIGER, "bf16": True}, True, []),
        (LIGER, False, []),  # the run is on this machine's CPU
        ({**MICRO_BATCH, "bf16": True}, False, []),
    ],
)
def test_liger_has_to_be_installed_for_a_gpu(load, monkeypatch, training, is_installed, blockers):
    find_spec = gate.importlib.util.find_spec

    def find(name, *arguments):
        if name == "liger_kernel":
            return "its spec" if is_installed else None
        return find_spec(name, *arguments)

    monkeypatch.setattr(gate.importlib.util, "find_spec", find)
    lines = [str(problem) for problem in gate.check_reality(load(training=training)).blockers]
    assert [line.rpartition(": ")[2] for line in lines if "liger" in line] == blockers


@pytest.mark.parametrize(
    ("profile", "has_gpu", "reason"),
    [
        (ZERO_2, False, "DeepSpeed on a CPU compiles its communication"),
        (OFFLOADING, True, "offload_optimizer compiles its optimizer"),
        (ZERO_2, True, None),
    ],
)
def test_what_deepspeed_compiles_needs_a_compiler(load, monkeypatch, profile, has_gpu, reason):
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_gpu)
    report = PreflightReport()
    read = gate.check_deepspeed(load(), profile, report)
    assert read["zero_optimization"] == profile["zero_optimization"]
    assert [reason in str(blocker) for blocker in report.blockers] == ([True] if reason else [])
    assert gate.check_deepspeed(load(), None, report) is None


def test_an_optimizer_on_the_host_is_not_compiled_by_a_check(load, monkeypatch):
    built = []
    monkeypatch.setattr(gate, "build_optimizer", lambda *_, **options: built.append(options))
    gate.try_optimizer(load(), OFFLOADING)
    assert built == []
    gate.try_optimizer(load(), ZERO_2)
    gate.try_optimizer(load(), None)
    gate.try_optimizer(load(training={**MICRO_BATCH, "fsdp": True}), None)
    assert [tuple(options.values()) for options in built] == [
        (False, True, False),
        (False, False, False),
        (False, False, True),
    ]


def test_an_archive_in_a_folder_has_to_be_writable(load, tmp_path):
    def found_with(archive):
        return mistakes(load(checkpoints={"archive": str(archive)}))

    assert found_with(tmp_path / "new" / "folder") == []
    (mistake,) = found_with("/proc/archive")
    assert mistake.startswith("RecipeError: `checkpoints.archive`: cannot write to /proc")


def test_values_that_only_a_run_can_choose_are_unchecked_or_refused(load, monkeypatch):
    automatic = {"per_device_train_batch_size": "auto", "gradient_checkpointing": "auto"}
    away = {"stage": "cpt", "model": {"path": "a/b"}, "tokenizer": {"path": "a/b"}}
    report = gate.check_recipe(load(**away, training=automatic))
    assert report.mistakes == []
    keys = "`training.per_device_train_batch_size: auto`, `training.gradient_checkpointing: auto`"
    assert [line.startswith(f"{keys}: chosen at") for line in report.unchecked].count(True) == 1
    assert not any("chosen at" in line for line in gate.check_recipe(load(**away)).unchecked)

    def fails(*_):
        raise KeyError("no layers")

    monkeypatch.setattr("cpt.planning.fitting.count_model", fails)
    (mistake,) = gate.check_recipe(load(training=automatic)).mistakes
    assert "could not be planned (KeyError" in str(mistake)
    wrong = gate.check_recipe(load(training=automatic, optimizer={"name": "adamv"})).mistakes
    assert ["adamv" in str(mistake) for mistake in wrong] == [True]


def test_settings_are_judged_as_on_any_machine(load):
    def found_with(positions=None, **sections):
        recipe = load(**sections)
        model = None
        if positions is not None:
            shape = {"vocab_size": 320, "n_embd": 32, "n_layer": 1, "n_head": 2}
            config = {"model_type": "gpt2", **shape, "n_positions": positions}
            model = build_on_meta(config_from(config))
        return sorted(gate.setting_mistakes(recipe, model))

    assert found_with() == found_with(64) == []
    assert found_with(output_dir="/proc/runs", training={**MICRO_BATCH, "bf16": True}) == []
    (mistake,) = found_with(63)
    assert "`data.sequence_length` is 64" in mistake
    automatic = {"per_device_train_batch_size": "auto", "torch_compile_mode": "fast"}
    (mistake,) = found_with(training={**automatic, "deepspeed": ZERO_2})
    assert "torch_compile_mode" in mistake
    broken = {
        "optimizer": {"name": "adamv"},
        "training": {**MICRO_BATCH, "deepspeed": ZERO_2 | CLIPS},
    }
    assert [
        word in line
        for word, line in zip(("adamv", "gradient_clipping"), found_with(**broken), strict=True)
    ] == [True, True]


def test_a_missing_compiler_is_a_blocker_on_this_machine(load, monkeypatch):
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    found = gate.check_reality(load(training={**MICRO_BATCH, "torch_compile": True}))
    assert found.mistakes == [] and found.exit_code == 3 and "g++" in str(found.blockers[0])


BFLOAT16 = {"from_scratch": True, "config": TINY_LLAMA, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {**MICRO_BATCH, "torch_compile": True}}, "training.torch_compile"),
        ({"training": {**MICRO_BATCH, "use_liger_kernel": True}}, "training.use_liger_kernel"),
        ({"model": BFLOAT16}, "optimizer.name"),
        ({"model": BFLOAT16, "optimizer": {"rounding": "kahan"}}, "optimizer.name"),
        (
            {"model": {"from_scratch": True, "config": TINY_LLAMA, "attention": "flex_attention"}},
            "model.attention",
        ),
        ({"model": BFLOAT16, "optimizer": {"name": "muon"}}, None),
        ({"model": {"from_scratch": True, "config": TINY_LLAMA, "fused_loss": True}}, None),
    ],
)
def test_what_needs_triton_is_a_blocker_where_triton_fails(load, monkeypatch, sections, key):
    recipe = load(**sections)
    before = gate.check_reality(recipe)
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    found = gate.check_reality(recipe)
    blockers = [str(blocker) for blocker in found.blockers if "no C compiler" in str(blocker)]
    assert len(found.blockers) == len(before.blockers) + len(blockers)
    assert [blocker.split("`")[1] for blocker in blockers] == ([] if key is None else [key])


def test_adapters_of_a_bfloat16_base_need_no_triton(load, monkeypatch):
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    recipe = load(model=BFLOAT16)
    adapters = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"lora": {"r": 2}})}
    )
    gate.try_optimizer(adapters, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU")
@pytest.mark.parametrize(
    ("training", "visible", "is_blocked"),
    [
        ({"bf16": True}, None, True),
        ({"fp16": True}, "0", True),
        ({"bf16": True, "use_cpu": True}, None, False),
        ({"bf16": True}, "", False),
        ({}, None, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_blocks_a_recipe_for_gpus(
    load, monkeypatch, training, visible, is_blocked
):
    monkeypatch.setattr(gate, "find_gpus", lambda: [Gpu("Some GPU", 24.0, 24.0, "550.54", "8.9")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gate.check_reality(load(training={**MICRO_BATCH, **training}))
    blockers = [str(blocker) for blocker in found.blockers if "Some GPU" in str(blocker)]
    assert bool(blockers) is is_blocked
    assert not blockers or "training.use_cpu: true" in blockers[0]


# --- settings outside what is published ---------------------------------------------------------------------------

SOUND = {
    "name": "r",
    "model": {"path": "meta-llama/Llama-2-7b-hf"},
    "data": {
        "sources": [{"path": "mine", "weight": 0.95}, {"path": "general-replay", "weight": 0.05}],
        "sequence_length": 4096,
    },
    "budget": {"tokens": 10**9, "global_batch_tokens": 2**20},
    "optimizer": {"learning_rate": 3e-5},
    "schedule": {"name": "rewarm_cosine", "warmup_tokens": 10**7},
    "checkpoints": {"every_steps": 0.1},
}
UNKNOWN_BASE = {"path": "a/b"}


def test_layers_that_the_recipe_compiles_under_autocast_on_an_rtx_50_are_a_warning(
    load, monkeypatch
):
    rtx_50 = Gpu(
        name="RTX 5080", memory_gib=16, free_gib=16, driver="580", compute_capability="12.0"
    )
    monkeypatch.setattr("cpt.planning.fitting.find_gpus", lambda: [rtx_50])
    compiled = {**MICRO_BATCH, "bf16": True, "fsdp": True, "torch_compile": True}
    (warning,) = [
        line for line in gate.check_reality(load(training=compiled)).warnings if "compile" in line
    ]
    assert "191433" in warning


def warnings(**sections) -> list[str]:
    return gate.craft_warnings(Recipe.model_validate({**SOUND, **sections}), 6_700_000_000, 4096)


def replaying(share: float) -> dict:
    return {
        "sources": [
            {"path": "mine", "weight": 1 - share},
            {"path": "general-replay", "weight": share},
        ]
    }


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({"optimizer": {"learning_rate": 4e-4}}, "0.0003 (arXiv 2307.09288)"),
        ({"optimizer": {"learning_rate": 1e-7}}, "`optimizer.learning_rate`"),
        ({"model": UNKNOWN_BASE, "optimizer": {"learning_rate": 1e-3}}, "6.7B"),
        ({"model": {**UNKNOWN_BASE, "lora": {}}, "optimizer": {"learning_rate": 1e-3}}, "LoRA"),
        (
            {"model": {**UNKNOWN_BASE, "lora": "cpt"}, "optimizer": {"learning_rate": 1e-4}},
            "embedding_learning_rate",
        ),
        (
            {"optimizer": {"learning_rate": 1e-5, "embedding_learning_rate": 1e-4}},
            "embedding_learning_rate",
        ),
        ({"data": {"sources": [{"path": "mine"}]}}, "`data.sources`"),
        ({"data": replaying(0.001)}, "0.1 %"),
        ({"data": replaying(0.6)}, "60 %"),
        ({"schedule": {"name": "cosine"}}, "`schedule.warmup_tokens`"),
        ({"schedule": {"name": "cosine", "warmup_tokens": 2 * 10**8}}, "20 %"),
        ({"data": {**replaying(0.05), "sequence_length": 8192}}, "4,096 positions"),
        ({"budget": {"tokens": 10**9, "global_batch_tokens": 2**24}}, "4,194,304"),
        ({"checkpoints": {}}, "`checkpoints`"),
    ],
)
def test_one_setting_outside_its_band_is_one_warning(sections, warning):
    (found,) = warnings(**sections)
    assert warning in found


def test_pre_training_has_other_bands_than_continuing():
    model = {"from_scratch": True, "config": {"model_type": "llama"}}
    assert warnings(stage="pretrain", model=model, schedule={"name": "cosine"}) == []
