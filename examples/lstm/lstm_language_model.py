"""An LSTM language model outside the package; a recipe knows it by `model: {import:
examples.lstm.lstm_language_model}`."""

from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

# B rows, T tokens, D width, N documents

# What `generate` calls the state that it passes from step to step.
STATE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class LstmConfig(PreTrainedConfig):
    """Its shape. What has a usual name has that name here, so that everything that reads configs understands it."""

    model_type = "lstm_lm"

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 4
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True


@dataclass
class LstmState:
    """What the layers remember at the end of each row, two [B, D] a layer: what keys and values are elsewhere."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    tokens: int

    def get_seq_length(self) -> int:
        """How many tokens it has seen; `generate` asks."""
        return self.tokens

    def reorder_cache(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order: beam search asks."""
        self.layers = [(hidden[rows], cell[rows]) for hidden, cell in self.layers]


class Documents:
    """The documents of a batch as torch's LSTM takes sequences of several lengths: no padding, and each begins with a
    state of its own.

    Args:
        begins: [B, T], true where a document begins; its first column is.
    """

    def __init__(self, begins: torch.Tensor) -> None:
        rows, tokens = begins.shape
        starts = begins.flatten().nonzero().flatten()
        number = begins.flatten().cumsum(0) - 1  # of each token's document
        lengths = number.bincount()
        self.longest_first = lengths.argsort(descending=True, stable=True)
        rank = self.longest_first.argsort()
        place = (
            torch.arange(rows * tokens, device=begins.device) - starts[number]
        )  # in its document
        self.order = (
            place * len(starts) + rank[number]
        ).argsort()  # all first tokens, all second ones, ...
        self.back = self.order.argsort()
        self.batch_sizes = place.bincount().cpu()
        self.first_of_row = rank[number.view(rows, tokens)[:, 0]]
        self.last_of_row = rank[number.view(rows, tokens)[:, -1]]

    def run(
        self, lstm: nn.LSTM, hidden: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple]:
        """[B, T, D] through one layer. The row's state goes to its first document, that of the last document comes
        back."""
        begin = [
            part.new_zeros(len(self.longest_first), part.shape[-1]).index_copy(
                0, self.first_of_row, part
            )
            for part in state
        ]
        sequences = PackedSequence(hidden.flatten(0, 1)[self.order], self.batch_sizes)
        output, end = lstm(sequences, tuple(part.unsqueeze(0) for part in begin))
        return output.data[self.back].view_as(hidden), tuple(
            part[0, self.last_of_row] for part in end
        )


def find_documents(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, tokens: int
) -> Documents | None:
    """Documents begin with each row, where a position does not follow from the one before, and where padding begins or
    ends.

    Returns:
        None where each row is one document.
    """
    changes = []
    if position_ids is not None:
        changes.append(position_ids.diff(dim=1) != 1)
    if attention_mask is not None:
        changes.append(attention_mask[:, -tokens:].diff(dim=1) != 0)
    if tokens == 1 or not changes:
        return None
    rows = max(len(change) for change in changes)
    inside = torch.stack([change.expand(rows, -1) for change in changes]).any(0)
    return Documents(nn.functional.pad(inside, (1, 0), value=True)) if inside.any() else None


class LstmLayer(GradientCheckpointingLayer):
    """Norm, LSTM, projection, added to what came in. Gradient checkpointing is its base class's."""

    def __init__(self, config: LstmConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size, batch_first=True)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: torch.Tensor,
        documents: Documents | None,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """[B, T, D], with the state before and after."""
        normed = self.norm(hidden).to(
            self.lstm.weight_hh_l0.dtype
        )  # torch's kernels take one dtype, under autocast too
        if documents is not None:
            output, state = documents.run(self.lstm, normed, state)
        else:
            output, end = self.lstm(normed, tuple(part.unsqueeze(0) for part in state))
            state = tuple(part.squeeze(0) for part in end)
        return hidden + self.out_proj(output), state


class LstmPreTrainedModel(PreTrainedModel):
    """How weights are drawn, and what transformers may do with the model."""

    config: LstmConfig
    config_class = LstmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    keeps_documents_apart = (
        True  # by position_ids; cpt tries it before it packs documents into one row
    )
    _is_stateful = True  # a state cannot be cut back, as some ways to generate would have it
    _no_split_modules = ["LstmLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.LSTM):
            for name, parameter in module.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter) if "hh" in name else nn.init.xavier_uniform_(
                        parameter
                    )
                else:
                    nn.init.zeros_(parameter)
            # Remember at first: the forget gate's bias is 1 (proceedings.mlr.press/v37/jozefowicz15.html).
            module.bias_ih_l0[module.hidden_size : 2 * module.hidden_size] = 1


class LstmModel(LstmPreTrainedModel):
    """Tokens to hidden states."""

    def __init__(self, config: LstmConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LstmLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        state: LstmState | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **_: object,
    ) -> BaseModelOutputWithPast:
        """Shapes: [B, T] ids, mask and positions; positions that begin anew are a new document."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rows, tokens, width = hidden.shape
        documents = find_documents(position_ids, attention_mask, tokens)
        empty = hidden.new_zeros(rows, width, dtype=self.layers[0].lstm.weight_hh_l0.dtype)
        states = state.layers if state is not None else [(empty, empty)] * len(self.layers)
        ends = []
        for layer, begin in zip(self.layers, states, strict=True):
            hidden, end = layer(hidden, documents, begin)
            ends.append(end)
        seen = tokens + (state.tokens if state is not None else 0)
        keeps = self.config.use_cache if use_cache is None else use_cache
        return BaseModelOutputWithPast(
            self.norm(hidden), **{STATE: LstmState(ends, seen) if keeps else None}
        )


class LstmForCausalLM(LstmPreTrainedModel, GenerationMixin):
    """Hidden states to logits and loss."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LstmConfig) -> None:
        super().__init__(config)
        self.model = LstmModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **options: object,
    ) -> CausalLMOutputWithPast:
        """As transformers' own: labels are shifted here, and `num_items_in_batch` among the options divides the
        loss."""
        state = options.pop(STATE, None)
        output = self.model(
            input_ids, attention_mask, position_ids, state, inputs_embeds, use_cache
        )
        logits = self.lm_head(
            output.last_hidden_state[:, -logits_to_keep:].to(self.lm_head.weight.dtype)
        )
        loss = (
            None
            if labels is None
            else self.loss_function(logits, labels, self.config.vocab_size, **options)
        )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{STATE: output.get(STATE)})

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # there are no keys and values: the state comes with the first output


AutoConfig.register(LstmConfig.model_type, LstmConfig, exist_ok=True)
AutoModelForCausalLM.register(LstmConfig, LstmForCausalLM, exist_ok=True)
# This file is copied beside the weights wherever they are saved, so that others can load them with
# `trust_remote_code=True`.
LstmConfig.register_for_auto_class()
LstmForCausalLM.register_for_auto_class("AutoModelForCausalLM")
