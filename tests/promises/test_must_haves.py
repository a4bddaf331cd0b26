"""What must be there, whatever becomes of the code: one list, and a test that finds or builds each entry as a user
names it.

Add to the list; take nothing from it. How well each part works is tested elsewhere.
"""

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from promises.conftest import BIN, ROOT, shell, trainer_of
from tiny import SHAPE, SPECIAL, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from cpt import build_model, load_recipe, load_tokenizer

# --- the list --------------------------------------------------------------------------------------------------------

FAMILIES = [  # `model.config.model_type`
    "llama",
    "mistral",
    "gemma3_text",
    "olmo2",
    "nemotron",
    "nemotron_h",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt2",
    "cpt-gpt2",
    "minimind2",
    "minimind2_moe",
    "minimind3",
    "minimind3_moe",
]
STAGES = {  # `stage`, and the class that trains it
    "pretrain": "CPTTrainer",
    "cpt": "CPTTrainer",
    "sft": "CPTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "orpo": "ORPOTrainer",
    "cpo": "CPOTrainer",
    "reward": "RewardTrainer",
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "ppo": "PPOTrainer",
    "spo": "SPOTrainer",
    "distill": "DistillTrainer",
    "distill_text": "DistillTrainer",
    "distill_on_policy": "DistillationTrainer",
    "gkd": "GKDTrainer",
}
OPTIMIZERS = [
    "adamw",
    *(
        pytest.param(name, marks=pytest.mark.quantized)
        for name in ("adamw_8bit", "paged_adamw_8bit")
    ),
    "sgd",
    "muon",
    "soap",
    "shampoo",
    "torch.optim:NAdam",
]
SCHEDULES = {  # `schedule.name`, and what else it needs
    "constant": "",
    "linear": "",
    "cosine": "",
    "rewarm_cosine": "warmup_tokens: 256",
    "wsd": "decay_tokens: 256",
    "infinite": "warmup_tokens: 256, cooldown_tokens: 256, anneal_tokens: 256",
    "continued": "schedule: {name: cosine}, trained_tokens: 256",
}
PROFILES = {  # in deepspeed_configs/, and their ZeRO stage
    "ds_config_zero1.json": 1,
    "ds_config_prototype.json": 2,
    "ds_config_production.json": 3,
    "ds_config_8b_24gb.json": 3,
}
STARTS = [  # each is followed by a recipe
    "accelerate launch --config_file launch/cpu_2_processes.yaml cpt/train.py",
    "torchrun --nproc_per_node 2 cpt/train.py",
    "deepspeed --num_accelerators 2 cpt/train.py",
    "python -m cpt train",
    "cpt train",
]
TARGETS = {  # of the Makefile, and what they start
    "train-prototype": "accelerate launch",
    "train-production": "torchrun",
}
COMMANDS = [
    *("demo", "init", "check", "train", "verdict"),
    *("plan", "rehearse", "doctor", "recipes", "import", "schema"),
    *("data", "data check", "data preview", "data ingest", "data rewrite", "data generate-replay"),
    *("mixture", "tokenizer", "tokenizer report", "tokenizer extend", "tokenizer train"),
    *("prepare", "store", "store list", "store verify", "store prune", "contamination"),
    *("launch", "pipeline", "search", "runs", "compare", "report"),
    *("evaluate", "reproduce", "verify"),
    *("export", "merge", "serve", "chat"),
]
WITH_LORA = ["train", "check", "plan"]  # commands that take `--lora`

# --- and that it is there --------------------------------------------------------------------------------------------

TINY_RECIPES = ROOT / "recipes/tiny"
OTHERS = {  # the smallest configs that tests/tiny.py does not have
    "mistral": {"intermediate_size": 48},
    "gemma3_text": {"intermediate_size": 48, "head_dim": 8},
    "olmo2": {"intermediate_size": 48},
    "qwen2_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
IDS = torch.arange(3, 63).view(2, 30)


def smallest_config(family: str) -> dict:
    """For the tokenizer of the promises."""
    if family in OTHERS:
        return {
            "model_type": family,
            **SHAPE,
            **OTHERS[family],
            **SPECIAL,
            "vocab_size": 320,
            "pad_token_id": 0,
        }
    if family == "cpt-gpt2":
        return tiny_config(family, vocab_size=384, unpadded_vocab_size=320)
    return tiny_config(family, vocab_size=320)


def assert_learns(model: torch.nn.Module) -> None:
    """A batch has a finite loss and a gradient for each weight that is trained."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_built_and_learns(family, recipe, write):
    recipe["model"] = {"from_scratch": True, "config": smallest_config(family)}
    loaded = load_recipe(write(recipe))
    model = build_model(loaded, load_tokenizer(loaded))
    assert isinstance(model.config, type(AutoConfig.for_model(family)))
    assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)
    assert_learns(model)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """A model with the tokenizer of recipes/tiny: the base of stage `cpt`, and a teacher."""
    folder = tmp_path_factory.mktemp("tiny_base")
    tokenizer = TINY_RECIPES / "tokenizer"
    model = build_model(
        ROOT / "recipes/models/tiny/llama.yaml", tokenizer, ["model.from_scratch=true"]
    )
    model.save_pretrained(folder)
    load_tokenizer(
        load_recipe(TINY_RECIPES / "pretrain.yaml", [f"tokenizer.path={tokenizer}"])
    ).save_pretrained(folder)
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_a_recipe_and_its_trainer(stage, tiny_base, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # paths in shipped recipes begin there
    overrides = [f"output_dir={tmp_path}", "training.use_cpu=true"]
    if stage == "cpt":
        overrides.append(f"model.path={tiny_base}")
    if stage in ("distill", "distill_text", "distill_on_policy", "gkd"):
        overrides.append(f"training.teacher_model_name_or_path={tiny_base}")
    trainer, loaded, _ = trainer_of(TINY_RECIPES / f"{stage}.yaml", overrides)
    assert loaded.stage == stage
    assert STAGES[stage] in {kind.__name__ for kind in type(trainer).__mro__}


@pytest.fixture
def two_steps(recipe, write):
    """Build a trainer with overrides, and do two steps with gradients made up (SOAP's first one only prepares): its
    weights before and after, and the rates."""

    def step(*overrides: str):
        trainer, _, _ = trainer_of(write(recipe), overrides)
        trainer.create_optimizer_and_scheduler(num_training_steps=8)
        weights = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        rates = []
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            trainer.optimizer.step()
            rates += trainer.lr_scheduler.get_last_lr()
            trainer.lr_scheduler.step()
        return before, weights, rates

    return step


@pytest.mark.heavy
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_built_and_does_steps(name, two_steps):
    dtype = "bfloat16" if name.endswith("8bit") else "float32"
    before, after, _ = two_steps(
        f"optimizer.name={name}", "optimizer.learning_rate=0.1", f"model.dtype={dtype}"
    )
    for old, new in zip(before, after, strict=True):
        assert new.isfinite().all() and not new.equal(old)


@pytest.mark.heavy
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_built_and_does_steps(name, two_steps):
    _, _, rates = two_steps(
        f"schedule={{name: {name}, {SCHEDULES[name]}}}", "optimizer.learning_rate=0.1"
    )
    assert rates and all(0 < rate <= 0.1 for rate in rates)


@pytest.fixture
def typed(capsys, monkeypatch):
    """Type `cpt WORDS ...` in this process: the exit code, and what it printed."""
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="cpt")
    run = command.load()

    def type_words(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["cpt", *map(str, words)])
        code = 0
        try:
            run()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, "".join(capsys.readouterr())

    return type_words


@pytest.mark.heavy
@pytest.mark.parametrize("profile", PROFILES)
def test_a_deepspeed_profile_passes_check(profile, typed, recipe, write, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = Path("deepspeed_configs", profile)
    assert json.loads(path.read_text())["zero_optimization"]["stage"] == PROFILES[profile]
    code, said = typed("check", write(recipe), f"training.deepspeed={path}")
    assert code in (0, 3) and str(path) not in said, said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_help_page(command, typed):
    code, said = typed(*command.split(), "--help")
    assert code == 0 and f"Usage: cpt {command} " in said


@pytest.mark.parametrize("command", WITH_LORA)
def test_a_command_takes_lora(command, typed):
    _, said = typed(command, "--help")
    assert re.search(r"^\W*--lora\b", said, re.MULTILINE), (
        said
    )  # and not only in the words about it


@pytest.mark.heavy
def test_lora_trains_an_adapter(recipe, write, base_model, typed):
    recipe["model"] = {"path": str(base_model)}
    file = write(recipe)
    assert typed("check", file, "--lora", "--quick")[0] == 0
    loaded = load_recipe(file, lora=True)
    model = build_model(loaded, load_tokenizer(loaded))
    assert_learns(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)


@pytest.fixture
def refused(recipe, write) -> Path:
    """A recipe with a mistake, which whatever starts it must get to see."""
    recipe["stge"] = recipe.pop("stage")
    return write(recipe)


def heavy_or_slow(words: str):
    """Launchers import torch, and so does the file that they start."""
    is_fast = words.endswith("cpt train")
    return pytest.param(words, marks=pytest.mark.heavy if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("words", map(heavy_or_slow, STARTS))
def test_a_way_to_start_reads_its_recipe(words, refused):
    process = shell(*words.split(), refused)
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0 and "`stge` is not a recipe key" in said, said


@pytest.fixture
def made() -> Callable[[str], list[str]]:
    """The words of the command that a target of the Makefile starts."""

    def dry_run(target: str) -> list[str]:
        words = [
            "make",
            "--dry-run",
            "--no-print-directory",
            target,
            f"VENV={sys.prefix}",
            "GPUS=2",
        ]
        words.append(f"--old-file={sys.prefix}/.installed")  # the environment is not made anew
        printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return shlex.split(printed.splitlines()[-1])

    return dry_run


@pytest.mark.parametrize("target", TARGETS)
def test_make_starts_a_recipe_that_is_valid(target, made):
    words = made(target)
    launcher = TARGETS[target].split()
    assert words[: len(launcher)] == [str(BIN / launcher[0]), *launcher[1:]]
    files = [word for word in words if word.endswith((".py", ".yaml"))]
    assert "cpt/train.py" in files and all((ROOT / file).is_file() for file in files)
    assert load_recipe(ROOT / files[-1]).training


@pytest.mark.long  # tests/launch trains what it starts
@pytest.mark.parametrize("target", TARGETS)
def test_what_make_starts_reads_its_recipe(target, made):
    process = shell(*made(target), "stge=cpt")
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0 and "`stge` is not a recipe key" in said, said
