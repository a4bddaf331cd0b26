"""MiniMind's dense models: MiniMind2 is a Llama, MiniMind-3 a Qwen3, each under its own name and with its own
sizes."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import RopeParameters


class MiniMind2Config(LlamaConfig):
    """MiniMind2 (github.com/jingyaogong/minimind at c090b69); the defaults are its 104M model."""

    model_type = "minimind2"
    default_theta = 1e6

    vocab_size: int = 6400
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 2
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope_parameters: RopeParameters | dict | None = None


class MiniMind2ForCausalLM(LlamaForCausalLM):
    config: MiniMind2Config


@strict
class MiniMind3Config(Qwen3Config):
    """MiniMind-3 (github.com/jingyaogong/minimind at d65ef2c); the defaults are its 64M model."""

    model_type = "minimind3"
    default_theta = 1e6

    vocab_size: int = 6400
    hidden_size: int = 768
    intermediate_size: int = 2432  # hidden * pi, rounded up to a multiple of 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = None  # type: ignore[assignment]  # hidden / heads, as MiniMind has it
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: object) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class MiniMind3ForCausalLM(Qwen3ForCausalLM):
    config: MiniMind3Config
