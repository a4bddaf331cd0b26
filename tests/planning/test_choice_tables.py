"""What the planner reads from recipes, chooses for new ones and warns of, as approved: whole records and sentences."""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from approved import check_approved
from transformers import AutoConfig, AutoTokenizer

from cpt.errors import CptError
from cpt.hardware import Gpu
from cpt.models.inventory import build_on_meta, count_model_parameters, longest_row
from cpt.models.known_bases import BASES, known_base
from cpt.planning import gate
from cpt.planning.activations import ActivationCounts, Activations
from cpt.planning.init_recipe import BaseModel, DocumentStatistics, choose, round_down
from cpt.planning.speed import find_target, named_gpus
from cpt.planning.workload import attention_on_gpu, compiles, is_wrong_under_autocast, read_setup
from cpt.recipe.schema import DocumentSource, Recipe

HERE = Path(__file__).parent
MIB = 2**20
ROW = Activations(
    kept=900 * MIB,
    layer_inputs=70 * MIB,
    backward=30 * MIB,
    again=90 * MIB,
    forward=20 * MIB,
    layers=36,
)
COUNTS = ActivationCounts(
    ROW,
    replace(
        ROW,
        kept=1800 * MIB,
        layer_inputs=140 * MIB,
        backward=60 * MIB,
        again=180 * MIB,
        forward=40 * MIB,
    ),
)
GPT2_LARGE = AutoConfig.for_model("gpt2", n_embd=2560, n_layer=9, n_head=20, n_positions=8192)
LLAMA_13B = AutoConfig.for_model(
    "llama", hidden_size=8192, intermediate_size=57344, num_hidden_layers=8, num_attention_heads=64
)
LLAMA_1B = AutoConfig.for_model(
    "llama",
    hidden_size=2048,
    intermediate_size=32768,
    num_hidden_layers=4,
    tie_word_embeddings=True,
)
GPT2 = AutoConfig.for_model("gpt2", n_layer=3)
FACTS = DocumentStatistics(
    source=DocumentSource(path="papers"),
    formats=Counter({"jsonl": 3}),
    documents=12_345,
    documents_read=12_000,
    languages=Counter({"en": 190, "de": 10}),
    tokens=123_456_789,
    bytes_per_token=4.2,
    compared_with_english=0.95,
)
FAR = {"bytes_per_token": 2.4, "compared_with_english": 0.6}
GERMAN = {"languages": Counter({"de": 120, "en": 80}), "compared_with_english": 0.9}
CHOICES = {
    "plain": {},
    "far": {"found": FAR},
    "in German": {"found": GERMAN},
    "in German, which fits": {"found": GERMAN | {"compared_with_english": 1.0}},
    "language unknown": {"found": {"languages": None, "compared_with_english": 0.75}},
    "strong as requested": {"shift": "strong", "with_replay": False},
    "weak as requested": {"found": FAR, "shift": "weak", "tokens": 50_000_000},
    "few tokens": {"found": {"tokens": 30_000_000, "documents": 300}},
    "many tokens": {"found": {"tokens": 3 * 10**9, "documents": 3_000_000}},
    "tiny": {"config": GPT2, "found": {"tokens": 1_000_000, "documents": 499}},
    "too few": {"found": {"tokens": 2000}},
    "on the CPU": {"gpu": "cpu", "config": GPT2, "found": {"tokens": 1_000_000}},
    "four H100": {"gpu": "H100", "gpus": 4},
    "three 4090": {"gpus": 3},
    "13B on one A100": {"config": LLAMA_13B, "gpu": "A100-80GB"},
    "13B on a 4080": {"config": LLAMA_13B, "gpu": "RTX 4080"},
    "13B on eight A100": {"config": LLAMA_13B, "gpu": "A100-80GB", "gpus": 8},
    "13B, full, on a 4090 with a large host": {"config": LLAMA_13B, "full": True, "host": 512.0},
    "13B on a 4090, host unknown": {"config": LLAMA_13B, "full": True, "host": None},
    "1B, tied": {"config": LLAMA_1B, "gpu": "RTX 4080", "full": False},
    "Llama 2": {"path": "meta-llama/Llama-2-7b-hf"},
    "Llama 2, far": {"path": "meta-llama/Llama-2-7b-hf", "found": FAR},
    "Llama 3.1, adapters": {"path": "/models/Llama-3.1-8B", "full": False},
    "SmolLM": {"path": "HuggingFaceTB/SmolLM-135M", "packs": False},
    "pythia": {"path": "EleutherAI/pythia-160m", "config": GPT2, "found": FAR},
    "gpt2": {"path": "openai-community/gpt2", "config": GPT2},
}


@pytest.fixture
def choice_of(tokenizer_folder, monkeypatch):
    """What is chosen, in lines; activations are given, as counting them takes seconds."""
    monkeypatch.setattr("cpt.planning.memory.count_activations", lambda *_: COUNTS)
    monkeypatch.setattr("cpt.planning.speed.find_gpus", list)
    # the speed of this CPU is measured
    monkeypatch.setattr("timeit.repeat", lambda *_, **__: [3.0, 0.02, 0.5, 0.1])
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    models = {}

    def of(config=GPT2_LARGE, gpu="RTX 4090", path="some/base", gpus=1, packs=True, **options):
        if id(config) not in models:
            model = build_on_meta(config)
            models[id(config)] = model, count_model_parameters(model).total
        model, parameters = models[id(config)]
        known, longest = known_base(path), longest_row(config)
        base = BaseModel(path, model, tokenizer, parameters, longest, packs, known)
        facts = replace(FACTS, **options.pop("found", {}))
        target = find_target(gpu, gpus, options.pop("host", 64.0))
        try:
            found = choose(facts, base, target, **options)
        except CptError as problem:
            return [f"{type(problem).__name__}: {problem}"]
        derived = (
            f"beta2 {found.beta2}, shrinking {found.shrinking:.4g}, strong {found.is_strong_shift}"
        )
        between = [found.tokens_between(times) for times in (5, 10**9)]
        return [
            *(f"{key}: {value}" for key, value in asdict(found).items()),
            f"{derived}, {between}",
        ]

    return of


@pytest.mark.heavy
def test_choices_for_a_new_recipe_are_as_approved(choice_of):
    lines = [str(asdict(base)) for base in BASES]
    for name, options in CHOICES.items():
        lines += ["", f"== {name}", *choice_of(**options)]
    check_approved("\n".join(lines) + "\n", HERE / "approved_choices.txt")


@pytest.mark.parametrize(
    ("number", "rounded"),
    [(1_234_567, 1_200_000), (9_999, 9_900), (10, 10), (99, 99), (7, 7), (1000, 1000), (1.5, 1)],
)
def test_two_digits_remain(number, rounded):
    assert round_down(number) == rounded


def test_gpus_are_named_or_found():
    two = [Gpu("Some GPU", 24, 24, "580", "9.0")] * 2
    assert named_gpus(None, None, 3, two) == ("Some GPU", 6)
    assert named_gpus(None, 4, 2, two) == ("Some GPU", 4)
    assert named_gpus("H100", None, 1, two) == ("H100", 1)
    assert named_gpus("H100", 6, 3, []) == ("H100", 6)
    assert named_gpus(" CPU ", None, 1, []) == (" CPU ", 1)
    for arguments, named in {
        (None, None, 1): "no GPU on this machine",
        ("cpu", None, 2): "--gpu cpu",
        ("H100", None, 2): "--gpus 16",
        ("H100", 5, 2): "--gpus 5 cannot",
    }.items():
        with pytest.raises(CptError, match=named):
            named_gpus(*arguments, [])


# --- what a recipe means ---


def recipe(stage="cpt", model=None, data=None, budget=None, optimizer=None, rewards=(), **training):
    return Recipe.model_validate(
        {
            "name": "run",
            "stage": stage,
            "model": {"path": "base", **(model or {})},
            "data": {"sequence_length": 96, "sources": [{"path": "documents"}], **(data or {})},
            "budget": {"tokens": 10**7, "global_batch_tokens": 96 * 30, **(budget or {})},
            "optimizer": optimizer or {},
            "rewards": list(rewards),
            "training": training,
        }
    )


BATCH = {"per_device_train_batch_size": 3}
STEPS = {"budget": {"global_batch_tokens": None}, "gradient_accumulation_steps": 5}
GRPO = {"rewards": ["exact_match"], **BATCH}
RECIPES = {
    "plain": recipe(),
    "half": recipe(bf16=True, **BATCH),
    "fp16": recipe(fp16=True, tf32=True, **BATCH),
    "steps": recipe(**BATCH, **STEPS),
    "a small batch": recipe(per_device_train_batch_size=200),
    "dtype": recipe(model={"dtype": "bfloat16", "fused_loss": True}, bf16=True),
    "fp32": recipe(model={"dtype": "float32", "fused_loss": False}, bf16=True),
    "smoothed": recipe(label_smoothing_factor=0.1),
    "recomputed": recipe(gradient_checkpointing=True, torch_compile=True),
    "recomputed, selective": recipe(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True}
    ),
    "adapters": recipe(model={"lora": {"r": 3}}, bf16=True),
    "4 bit": recipe(model={"lora": {"r": 3, "quantize": "nf4"}}, bf16=True),
    "parts": recipe(model={"train_only": ["lm_head"]}),
    "foreign code": recipe(model={"trust_remote_code": True}),
    "scratch": recipe(
        "pretrain", model={"path": None, "from_scratch": True, "config": {"model_type": "llama"}}
    ),
    "8 bit": recipe(
        optimizer={"name": "adamw_8bit", "rounding": "stochastic", "release_gradients": True},
        max_grad_norm=0,
    ),
    "one document a row": recipe(data={"packing": "none"}),
    "budget": recipe(data={"packing": "token_budget"}, bf16=True),
    "sliding": recipe(data={"packing": "sliding_window"}),
    "short": recipe(budget={"tokens": 96 * 30 * 99}),
    "just long": recipe(budget={"tokens": 96 * 30 * 100}),
    "shared rows": recipe(parallelism_config={"sp_size": 2}),
    "tensors": recipe(parallelism_config={"tp_size": 2}),
    "FSDP2": recipe(fsdp=True, bf16=True),
    "FSDP2, kept": recipe(
        fsdp=True,
        fsdp_config={"reshard_after_forward": False},
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    ),
    "near the base": recipe(
        data={"sources": [{"path": "a", "weight": 1, "replay_kl": 0.5}, {"path": "b", "weight": 3}]}
    ),
    **{stage: recipe(stage, bf16=True) for stage in ("sft", "dpo", "kto", "orpo", "cpo", "reward")},
    "grpo": recipe("grpo", **GRPO),
    "grpo, far": recipe("grpo", **GRPO, beta=0.1, steps_per_generation=2, max_completion_length=7),
    "grpo, vllm": recipe("grpo", **GRPO, use_vllm=True, generation_batch_size=12),
    "grpo, sharded": recipe("grpo", **GRPO, ds3_gather_for_generation=False),
    "rloo": recipe("rloo", **GRPO),
}
PROFILES = {
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 1e6,
            "allgather_bucket_size": 7,
            "offload_optimizer": {"device": "cpu"},
        },
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage 3": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "none"},
            "stage3_max_live_parameters": 3,
            "stage3_max_reuse_distance": 5,
            "stage3_prefetch_bucket_size": "auto",
            "sub_group_size": 11,
            "zero_hpz_partition_size": 4,
        }
    },
    "no engine": {"zero_optimization": {"stage": 0}},
    "nothing": {},
}


def setup_in_words(setup, plain) -> str:
    """What differs from the plain setup."""
    before = asdict(plain)
    return ", ".join(
        f"{key} {value}" for key, value in asdict(setup).items() if value != before[key]
    )


def test_setups_of_recipes_are_as_approved():
    plain = read_setup(RECIPES["plain"], 4, None, attention="sdpa", nodes=2)
    lines = [str(asdict(plain)), ""]
    for name, one in RECIPES.items():
        setup = read_setup(one, 4, None, attention="sdpa", nodes=2)
        derived = (setup.gpus_per_node, setup.sequences, setup.length, setup.sampled)
        derived += (setup.precision, setup.tokens_per_step, setup.tokens_at_once)
        attention = [
            attention_on_gpu(one, AutoConfig.for_model(kind)) for kind in ("llama", "mamba2", "opt")
        ]
        why = [
            compiles(one, zero3=zero3, on_cpu=on_cpu)
            for zero3, on_cpu in ((False, False), (True, False), (False, True))
        ]
        lines += [
            f"== {name}",
            setup_in_words(setup, plain),
            str(derived),
            str(attention),
            str(why),
        ]
        lines.append(
            f"{[is_wrong_under_autocast(one, version) for version in ('12.0', '9.0', None)]}"
        )
    for name, profile in PROFILES.items():
        for what in ("half", "fp16", "steps"):
            setup = read_setup(
                RECIPES[what], 3, profile, attention="varlen", on_cpu=what == "steps"
            )
            lines += [f"== {name}, {what}", setup_in_words(setup, plain)]
    check_approved("\n".join(lines) + "\n", HERE / "approved_setups.txt")


# --- warnings ---

SOUND = {
    "name": "r",
    "model": {"path": "meta-llama/Llama-2-7b-hf"},
    "data": {
        "sources": [
            {"path": "mine", "weight": 1.9},
            {"path": "replay-a", "weight": 0.07},
            {"path": "general", "weight": 0.03},
        ],
        "sequence_length": 4096,
    },
    "budget": {"tokens": 10**9, "global_batch_tokens": 2**20},
    "optimizer": {"learning_rate": 3e-5},
    "schedule": {"name": "rewarm_cosine", "warmup_tokens": 10**7},
    "checkpoints": {"every_steps": 0.1},
}


def rated(rate, **options):
    return {"optimizer": {"learning_rate": rate, **options}}


def replaying(share):
    sources = [{"path": "mine", "weight": 1 - share}, {"path": "Replay", "weight": share}]
    return {"data": {"sources": sources, "sequence_length": 4096}}


UNKNOWN = {"model": {"path": "a/b"}}
LORA = {"model": {"path": "a/b", "lora": {}}}
SETTINGS = [
    {},
    rated(2e-2),
    rated(1e-2),
    rated(2e-2) | {"optimizer": {"learning_rate": 2e-2, "name": "muon"}},
    rated(3e-4),
    rated(3.1e-4),
    rated(9e-7),
    rated(1e-6),
    UNKNOWN | rated(6e-4),
    UNKNOWN | rated(7e-4),
    LORA | rated(1e-5),
    LORA | rated(5e-4),
    LORA | rated(9e-6),
    LORA | rated(6e-4),
    {"model": {"path": "a/b", "lora": "cpt"}} | rated(1e-4),
    {"model": {"path": "a/b", "lora": "cpt"}} | rated(1e-4, embedding_learning_rate=1e-5),
    rated(1e-5, embedding_learning_rate=2e-5),
    replaying(0.009),
    replaying(0.01),
    replaying(0.5),
    replaying(0.51),
    {"data": {"sources": [{"path": "mine"}], "sequence_length": 4096}},
    {"data": {"sources": [{"path": "mine"}, {"path": "other"}], "sequence_length": 4097}},
    {"schedule": {"name": "cosine"}},
    {"schedule": {"name": "cosine", "warmup_share": 0.1}},
    {"schedule": {"name": "cosine", "warmup_share": 0.11}},
    {"schedule": {"name": "cosine", "warmup_tokens": 2 * 10**8}},
    {"budget": {"tokens": 10**9, "global_batch_tokens": 2**23}},
    {"budget": {"tokens": 10**9, "global_batch_tokens": 2**23 + 4096}},
    {"checkpoints": {}},
    {
        "checkpoints": {},
        "budget": {"tokens": 9_999_999},
        "schedule": {"name": "rewarm_cosine", "warmup_tokens": 10**5},
    },
    {"checkpoints": {"every_tokens": 10**8}},
]


def test_warnings_of_settings_are_as_approved():
    lines = []
    for sections in SETTINGS:
        found = Recipe.model_validate({**SOUND, **sections})
        lines.append(f"== {sections}")
        for parameters in (
            (6_700_000_000, 135_000_000, None)
            if sections == UNKNOWN | rated(7e-4)
            else (6_700_000_000,)
        ):
            lines += gate.craft_warnings(found, parameters, 4096)
    lines.append("== 135M at 4e-3, and positions unknown")
    lines += gate.craft_warnings(
        Recipe.model_validate({**SOUND, **UNKNOWN, **rated(4e-3)}), 135_000_000, None
    )
    check_approved("\n".join(lines) + "\n", HERE / "approved_warnings.txt")
