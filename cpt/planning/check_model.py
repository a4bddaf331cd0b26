"""Check model, tokenizer and first examples: they exist, fit each other, and can process the rows."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cpt.cache import TOKENIZER, WEIGHTS, hub_is_reachable, is_cached, refuse_unreachable
from cpt.data.examples.chat_template import Refused
from cpt.data.examples.encoder import ExampleEncoder, encoder_of
from cpt.data.readers.columns import form_of_source, sections_of
from cpt.data.readers.documents import Document
from cpt.data.readers.example import example_of
from cpt.data.readers.sources import kind_of, pieces_of, read_piece
from cpt.data.store.tokenization import DocumentEncoder, adds_bos
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.models.adapters import check_lora, count_lora_parameters, lora_options
from cpt.models.attention import (
    VARLEN,
    VARLEN_NAMES,
    check_documents_can_be_handed_over,
    choose_attention,
)
from cpt.models.build import check_scoring
from cpt.models.config import config_from, load_config, read_config
from cpt.models.freezing import freeze_others
from cpt.models.inventory import build_on_meta, isolates_documents, rows_needed, vocabulary_size
from cpt.models.new_rows import (
    new_ids,
    num_new_rows,
    refuse_frozen_tables,
    refuse_untrained_rows,
)
from cpt.optim.groups import parameter_groups
from cpt.planning.check_resources import PreflightReport
from cpt.planning.model_sizes import TEACHER
from cpt.planning.workload import computes_in_half
from cpt.plugins import with_key
from cpt.recipe.paths import is_local, result_of_run
from cpt.recipe.rules import TAUGHT, keyed_sources
from cpt.recipe.schema import NEW_ROWS, Data, DocumentSource, Model, Recipe, Source
from cpt.stages.models import check_vocabulary
from cpt.stages.rewards import check_columns
from cpt.tokenizer.load import load_tokenizer

POSITIONS = ("wpe", "embed_positions", "position_embeddings")  # learned position embeddings
EXPECTING_BOS = ("llama", "mistral", "gemma")
BOS = ("<s>", "<bos>", "<|begin_of_text|>")


def check_model(recipe: Recipe, report: PreflightReport) -> PreTrainedModel | None:
    """Return the model without weights, checked against the recipe; None if it cannot be read here."""
    if recipe.model.train_only == NEW_ROWS:
        report.run(new_ids, Path(str(recipe.model.path)).expanduser())
    config = report.run(find_config, recipe, report)
    if config is None:
        return None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if recipe.model.trust_remote_code:
            report.unchecked.append(f"`model.trust_remote_code`: the code of {recipe.model.path}")
        else:
            report.refuse(
                f"`model.config.model_type`: {config.model_type} is not a causal language model. Choose one."
            )
        return None
    model = build_on_meta(config)
    check_architecture(recipe, model, report)
    return model


def check_architecture(recipe: Recipe, model: PreTrainedModel, report: PreflightReport) -> None:
    config = model.config
    report.run(check_attention, recipe, model)
    if recipe.data.packing not in ("none", "token_budget") and not isolates_documents(config):
        report.refuse(
            f"`data.packing`: {config.model_type} cannot isolate documents that are packed into one row. Write"
            " `packing: token_budget`, or `packing: none`."
        )
    length = recipe.data.sequence_length
    positions = learned_positions(model)
    if positions is not None and positions < length:
        report.refuse(
            f"`data.sequence_length` is {length}, but the model has {positions} learned positions. Lower it to that."
        )
    if recipe.stage == "reward":
        report.run(check_scoring, config)
    if recipe.model.lora is not None:
        report.run(check_adapters, recipe, model, recipe.model.lora)
    elif recipe.model.train_only is not None:
        report.warnings += (
            report.run(check_trained_parts, recipe, config, recipe.model.train_only) or ()
        )


def learned_positions(model: PreTrainedModel) -> int | None:
    numbers = [
        module.num_embeddings
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in POSITIONS and isinstance(module, nn.Embedding)
    ]
    return min(numbers, default=None)


def check_attention(recipe: Recipe, model: PreTrainedModel) -> None:
    packed = recipe.data.packing != "token_budget"
    is_half = computes_in_half(recipe.training) or recipe.model.dtype in ("bfloat16", "float16")
    attention = choose_attention(
        recipe.model.attention,
        type(model),
        config=model.config,
        half_precision=is_half,
        packed=packed,
    )
    if attention in VARLEN_NAMES:
        check_documents_can_be_handed_over(model)
    if recipe.model.attention == VARLEN and not packed:
        raise RecipeError(
            "`model.attention`: varlen needs rows without a mask, but `data.packing: token_budget` uses one."
            " Write `auto`."
        )


def check_adapters(recipe: Recipe, model: PreTrainedModel, lora: Mapping[str, Any]) -> None:
    """Check that peft can build the adapters, and that they train embeddings if these have a learning rate."""
    check_lora(model, lora)
    count_lora_parameters(model, lora)  # peft refuses some layers only when it adapts them
    if recipe.optimizer.options.get("embedding_learning_rate") is None:
        return
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name_of(model, table) for table in tables}
    if not names & trained_by(lora_options(model, lora)):
        raise RecipeError(
            "`optimizer.embedding_learning_rate` is set, but these adapters train neither embeddings nor head."
            " Remove it, or write `model.lora: cpt`."
        )


def check_trained_parts(
    recipe: Recipe, config: PreTrainedConfig, train_only: str | list[str]
) -> list[str]:
    """Check that the names exist, and that embeddings or head are trained if these have a learning rate."""
    model = build_on_meta(config)  # the other checks read the parameters of the whole model
    tied = freeze_others(model, train_only)
    rate = recipe.optimizer.options.get("embedding_learning_rate")
    parameter_groups(model, embedding_learning_rate=rate)
    return tied


def find_config(recipe: Recipe, report: PreflightReport) -> PreTrainedConfig | None:
    model = recipe.model
    if model.path is None or is_here(model.path, "config.json", model.revision):
        return load_config(model)
    if hub_is_reachable():
        try:
            return load_config(model)
        except ResourceError as problem:
            if isinstance(problem.__cause__, GatedRepoError):
                raise
    unchecked = f"`model.path`: {model.path} (Hub)"
    if model.config and not model.from_scratch:
        unchecked += ", and whether it has the shape of `model.config`"
    report.unchecked.append(unchecked)
    return config_from(model.config) if model.config and "model_type" in model.config else None


def is_here(path: str, file: str, revision: str | None) -> bool:
    return is_local(path) or is_cached(path, file, revision)


def refuse_unreachable_model(recipe: Recipe) -> None:
    """ResourceError if the model or tokenizer is neither in the Hub's cache nor can the Hub be reached."""
    model, tokenizer = recipe.model, recipe.tokenizer
    if model.path is not None and not is_local(model.path):
        files = ("config.json",) if model.from_scratch else WEIGHTS
        refuse_unreachable("`model.path`", model.path, model.revision, files)
    if tokenizer.path is not None and not is_local(tokenizer.path):
        refuse_unreachable("`tokenizer.path`", tokenizer.path, tokenizer.revision, TOKENIZER)


def check_tokenizer(recipe: Recipe, model: PreTrainedModel | None, report: PreflightReport) -> None:
    path = recipe.tokenizer.path or recipe.model.path
    revision = recipe.tokenizer.revision
    if revision is None and path == recipe.model.path:
        revision = recipe.model.revision
    if path and not is_here(path, "tokenizer_config.json", revision) and not hub_is_reachable():
        report.unchecked.append(
            f"`tokenizer.path`: {path} (Hub), and whether it gives the texts back"
        )
        return
    tokenizer = report.run(load_tokenizer, recipe.tokenizer, recipe.model)
    if tokenizer is None:
        return
    report.tokenizer = tokenizer

    with suppress(RecipeError):  # from `sections_of`; the check of documents reports it
        for key, source in keyed_sources(*sections_of(recipe)):
            fills_in = isinstance(source, Source) and source.fill_in_the_middle is not None
            if source.chat is not None or fills_in:
                report.run(encoder_of, source, DocumentEncoder(tokenizer), key)
        if not any(
            isinstance(mistake, DataError) for mistake in report.mistakes
        ):  # else unreadable
            check_first_examples(recipe, tokenizer, report)
    if model is not None:
        check_vocabularies(recipe, model, tokenizer, report)


def check_vocabularies(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: PreflightReport,
) -> None:
    path = recipe.tokenizer.path or recipe.model.path
    model_type = model.config.model_type
    needed_rows = rows_needed(tokenizer)
    rows = vocabulary_size(model.config)
    report.run(check_new_rows, recipe.model, model, needed_rows)

    expects_bos = model_type.startswith(EXPECTING_BOS) and not recipe.model.from_scratch
    if expects_bos and tokenizer.bos_token in BOS and not adds_bos(tokenizer):
        report.warnings.append(
            f"`tokenizer.path`: {path} does not put {tokenizer.bos_token} before a text, as {model_type}"
            " models were trained. Set `add_bos_token` in its tokenizer_config.json, if the base did"
        )

    if needed_rows > rows and not recipe.model.resize_embeddings:
        report.refuse(
            f"`tokenizer.path`: {path} has ids up to {needed_rows - 1}, the model's vocabulary {rows} rows. Set"
            " `model.resize_embeddings: true`, or use the model's own tokenizer."
        )


def check_new_rows(section: Model, model: PreTrainedModel, needed: int) -> None:
    """RecipeError if the tokenizer has tokens that the weights have not learned, and the recipe freezes their rows."""
    num_new = num_new_rows(section, needed, vocabulary_size(model.config))
    if not num_new or section.train_only == NEW_ROWS:
        return
    if section.lora is None:
        if section.train_only is not None:
            freeze_others(model, section.train_only)
            refuse_untrained_rows(model, num_new)
        return
    options = lora_options(model, section.lora)
    if options.get("trainable_token_indices"):
        return
    names = trained_by(options)
    tables = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    trained = [table for table, layer in tables.items() if name_of(model, layer) in names]
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    refuse_frozen_tables(trained, num_new, is_tied=is_tied)


def trained_by(options: Mapping[str, Any]) -> set[str]:
    """Last parts of the names of the modules that adapters train or adapt, without `all-linear`."""
    targets = options.get("target_modules") or ()
    if isinstance(targets, str):
        targets = ()
    return {*targets, *(options.get("modules_to_save") or ())}


def name_of(model: PreTrainedModel, table: nn.Module) -> str:
    return next(
        name.rpartition(".")[2] for name, module in model.named_modules() if module is table
    )


def check_teacher(recipe: Recipe, model: PreTrainedModel | None, report: PreflightReport) -> None:
    if recipe.stage not in TAUGHT:
        return
    key = f"training.{TEACHER}"
    path = result_of_run(recipe.training.get(TEACHER))
    if path is None or not is_there(path, None, key, report) or model is None:
        return
    with suppress(CptError):  # already reported by the tokenizer's check
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        report.run(with_key, key, lambda: check_vocabulary(model, tokenizer, Model(path=path)))


def is_there(path: str, revision: str | None, key: str, report: PreflightReport) -> bool:
    """Whether the config of another model can be read; adds mistakes to `report`."""
    if not is_here(path, "config.json", revision) and not hub_is_reachable():
        report.unchecked.append(f"`{key}`: {path} (Hub)")
        return False
    section = Model(path=path, revision=revision)
    return report.run(with_key, key, lambda: read_config(section)) is not None


def check_first_examples(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, report: PreflightReport
) -> None:
    for key, source in keyed_sources(*sections_of(recipe)):
        if form_of_source(source) != "document" and kind_of(source.path) == "local":
            report.run(check_first, recipe, source, key, DocumentEncoder(tokenizer))


def check_conversations(data: Data) -> None:
    for source in data.sources:
        if form_of_source(source) != "conversation" or kind_of(source.path) != "local":
            return
    texts = []
    for number, source in enumerate(data.sources):
        key = f"data.sources[{number}]"
        first = first_document(source, key)
        example = None if first is None else example_of(first.text)
        if first is None or example is None or not isinstance(example.messages, str):
            return
        texts.append(f"`{key}.path`: {first.where}")
    if texts:
        raise DataError(
            f"{texts[0]} is plain text, but stage `sft` needs conversations. To train on text, write `stage: cpt`; for"
            " conversations, `chat` names their columns: `chat: messages`, `chat: {prompt: question, completion:"
            " answer}`."
        )


def first_document(source: DocumentSource, key: str) -> Document | None:
    for piece in islice(pieces_of(source, key), 1):
        for row in read_piece(source, piece, key):
            return row if isinstance(row, Document) else None
    return None


def check_first(recipe: Recipe, source: DocumentSource, key: str, plain: DocumentEncoder) -> None:
    encoder = encoder_of(source, plain, key)
    first = first_document(source, key)
    if not isinstance(encoder, ExampleEncoder) or first is None:
        return  # the check of documents reports bad rows
    with suppress(Refused):  # runs skip and count such documents
        encoder.writer.write(first.text)
    example = example_of(first.text)
    if example is not None and example.columns is not None and key.startswith("data."):
        with suppress(RecipeError):  # the check of rewards reports it
            check_columns(recipe.rewards, list(example.columns))
