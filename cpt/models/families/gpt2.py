"""GPT-2 with its vocabulary padded to a multiple of 64 rows, which the logits never show."""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model


class CptGPT2Config(GPT2Config):
    """GPT-2's config, padded; without dropout, as models are pre-trained and continued today."""

    model_type = "cpt-gpt2"
    vocab_size: int = 50304  # rows: 50257 rounded up to a multiple of 64, a shape that tensor cores take whole
    unpadded_vocab_size: int = 50257
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.add_cross_attention:
            raise ValueError("add_cross_attention: there is no encoder to attend to. Remove it.")
        if self.unpadded_vocab_size > self.vocab_size:
            raise ValueError(
                f"unpadded_vocab_size ({self.unpadded_vocab_size}) is larger than vocab_size ({self.vocab_size})."
            )


class PaddedVocabularyHead(nn.Linear):
    """A language model head whose rows past `num_tokens` always give the smallest number of the dtype.

    Loss, argmax and sampling then never see them, and their gradient is zero. Code that multiplies with
    `lm_head.weight` itself (chunked or fused losses) must cut the weight to `num_tokens` rows.
    """

    def __init__(self, width: int, rows: int, num_tokens: int) -> None:
        super().__init__(width, rows, bias=False)
        self.num_tokens = num_tokens

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden_states)
        if self.num_tokens < logits.shape[-1]:
            logits[..., self.num_tokens :] = torch.finfo(logits.dtype).min
        return logits


class CptGPT2ForCausalLM(GPT2LMHeadModel):
    """transformers' GPT-2 (attention by its interface: sdpa, flash, eager) under the padded head."""

    config: CptGPT2Config

    def __init__(self, config: CptGPT2Config) -> None:
        super(GPT2LMHeadModel, self).__init__(
            config
        )  # GPT2LMHeadModel's own __init__ would build the plain head first
        self.transformer = GPT2Model(config)
        self.lm_head = PaddedVocabularyHead(config.n_embd, config.vocab_size, config.unpadded_vocab_size)
        self.post_init()

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Make room for `new_num_tokens` tokens; padding rows that become tokens start as the mean of the known
        ones."""
        known = self.config.unpadded_vocab_size
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is None:
            return embeddings
        with torch.no_grad():
            embeddings.weight[known:] = embeddings.weight[:known].mean(dim=0)
        self.config.unpadded_vocab_size = new_num_tokens
        self.lm_head = PaddedVocabularyHead(self.config.n_embd, embeddings.weight.shape[0], new_num_tokens)
        self.tie_weights()
        return embeddings


def pad_vocabulary(state_dict: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """A published GPT-2's weights with `rows` rows in the token embedding; the new ones are the mean of the old."""
    padded = {}
    for name, tensor in state_dict.items():
        if name.endswith(("wte.weight", "lm_head.weight")) and tensor.shape[0] < rows:
            filling = tensor.float().mean(dim=0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, filling.expand(rows - tensor.shape[0], -1)])
        padded[name] = tensor
    return padded
