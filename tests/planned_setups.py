"""Shapes of models and ways to run them, for the planner's tests."""

from dataclasses import replace

from cpt.planning.model_sizes import ModelSizes
from cpt.planning.workload import Setup, Sharding

PLAIN = Setup(
    gpus=1,
    on_cpu=False,
    micro_batch=1,
    sequence_length=512,
    accumulation=1,
    half=True,
    weights_bytes=2,
    checkpointing=False,
    fused_loss=False,
    packed=True,
    attention="sdpa",
    optimizer="adamw",
    lora=None,
    zero=None,
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
}
QWEN3 = {"model_type": "qwen3", "intermediate_size": 1536, "num_key_value_heads": 2, "head_dim": 64}
SHAPES = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, **QWEN3, "vocab_size": 50000, "tie_word_embeddings": True},
    "nemotron": {**LLAMA, "model_type": "nemotron", "intermediate_size": 2048, "vocab_size": 32000},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 384,
        "n_layer": 6,
        "n_head": 6,
        "vocab_size": 16000,
        "n_positions": 1024,
    },
}
AGAIN = {"checkpointing": True, "micro_batch": 4, "fused_loss": True}
WAYS = {
    "half": {},
    "autocast": {"weights_bytes": 4},
    "fp32": {"weights_bytes": 4, "half": False},
    "checkpointing": {"checkpointing": True, "micro_batch": 4},
    "adapters": {"lora": {"r": 16}},
    "adapters, checkpointing": {"lora": {"r": 16}, "checkpointing": True},
    "adapters beside 4 bit": {"lora": {"r": 16, "quantize": "nf4"}, "checkpointing": True},
    "accumulation": {"accumulation": 2, "weights_bytes": 4},
    "8 bit": {**AGAIN, "optimizer": "adamw_8bit", "rounding": "stochastic"},
    "8 bit, stochastic, released": {
        **AGAIN,
        "optimizer": "adamw_8bit",
        "rounding": "stochastic",
        "releases": True,
    },
    "kahan": {"rounding": "kahan", "checkpointing": True},
    "master, released": {"releases": True, "checkpointing": True, "fused_loss": True},
    "fused loss": AGAIN,
    "fused loss on the CPU": {
        "fused_loss": True,
        "on_cpu": True,
        "half": False,
        "weights_bytes": 4,
        "micro_batch": 4,
    },
    "ZeRO-3": {"zero": Sharding(3), "checkpointing": True},
    "flash": {"attention": "flash_attention_2", "micro_batch": 2},
    "one document in a row": {"packed": False, "micro_batch": 2},
    "on the CPU": {"on_cpu": True, "half": False, "weights_bytes": 4},
}
# a model whose sums can be made with a pencil: 1,000 numbers, of which 100 are the head's
FACTS = ModelSizes(
    name="llama",
    parameters=1000,
    trained=1000,
    head=100,
    vocabulary=50,
    hidden=2,
    largest_matrix=100,
    largest_layer=300,
    embedding=100,
    is_tied=False,
    flops_per_token=6000,
    has_fused_loss=True,
)


def setup_for(**changes: object) -> Setup:
    return replace(PLAIN, **changes)
