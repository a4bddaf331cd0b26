"""Walk the line between a base and the model trained from it, (1 - share) * base + share * trained: what each point
keeps of the domain and of general text (WiSE-FT, arXiv 2109.01903)."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import cast

import torch
from transformers import PreTrainedModel
from xxhash import xxh3_128

from cpt.checkpoints.model_folder import LARGEST_FILE
from cpt.data.rows.held_out import HeldOutSet
from cpt.data.rows.packing import PackedRows
from cpt.errors import CheckpointError, DataError
from cpt.evaluation.evaluate import EvaluationRequest, fit_packing, select_text_sets
from cpt.evaluation.paired import (
    Difference,
    DocumentLosses,
    bits_per_byte_difference,
    load_losses,
    save_losses,
)
from cpt.evaluation.scoring import document_losses
from cpt.evaluation.sets import EvaluationData, open_evaluation_sets
from cpt.export.export import write_model_card
from cpt.export.trained import stored_dtype
from cpt.export.write import rounded_to
from cpt.formatting import format_duration
from cpt.models.build import build_model
from cpt.models.config import load_config, weights_folder
from cpt.models.inventory import build_on_meta
from cpt.models.new_rows import carry_extension
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

log = logging.getLogger("cpt")
KEPT_GAIN = 0.9  # share of the domain gain that the best point must keep
SAME_IN_BOTH = ("model_type", "tie_word_embeddings", "rope_parameters")  # of the configs


class Line:
    """Both ends in host memory, in the wider of their stored dtypes.

    Raises:
        CheckpointError: the ends differ in architecture, shapes or tokenizer, or are not on this machine.
    """

    def __init__(self, base: Model, trained: Model) -> None:
        dtypes = []
        for end in (base, trained):
            dtypes.append(stored_dtype(weights_folder(str(end.path), end.revision)))
        self.trained = trained
        self.dtype = torch.promote_types(*dtypes)
        self.tokenizer = load_tokenizer(Tokenizer(), trained)
        refuse_unlike(base, trained)
        self.ends = [self.load(end, self.dtype).state_dict() for end in (base, trained)]

    def load(self, end: Model, dtype: torch.dtype) -> PreTrainedModel:
        loaded = build_model(end, self.tokenizer, dtype=dtype)
        assert isinstance(loaded, PreTrainedModel), "no adapter was requested"
        return loaded.eval()

    def put(self, model: PreTrainedModel, share: float) -> None:
        """Copy a point's weights into a model: the sum in fp32, rounded to the ends' dtype, as it would be stored."""
        for name, tensor in model.state_dict().items():
            base, trained = (end[name] for end in self.ends)
            if trained.dtype.is_floating_point:
                tensor.copy_(
                    ((1 - share) * base.float() + share * trained.float()).to(trained.dtype)
                )

    def walk(
        self,
        held: EvaluationData,
        shares: Sequence[float],
        general: Collection[str],
        folder: Path | None = None,
    ) -> dict[float, dict[str, DocumentLosses]]:
        """The losses of each point on each held-out set, as `cpt evaluate` measures them; no point is written. Raises
        DataError if all sets are `general`.

        Args:
            folder: keeps the losses of the points, so that none is measured twice.
        """
        sets = open_evaluation_sets(fit_packing(held, self.trained), self.tokenizer)
        text_sets = select_text_sets(sets, EvaluationRequest(is_compared=True))
        rows = {name: held_out_set.rows for name, held_out_set in text_sets.items()}
        if not rows.keys() - set(general):
            raise DataError(
                f"all held-out sets ({', '.join(rows)}) are general text. Add one of the domain."
            )
        on_gpu = torch.cuda.is_available()
        measured = None
        measured_losses = dict[float, dict[str, DocumentLosses]]()
        if folder is not None:
            measured = folder / self.key(rows, on_gpu=on_gpu)
            measured_losses = losses_in(measured, shares)
        missing = [share for share in shares if share not in measured_losses]
        if measured_losses:
            log.info(
                f"Measured before, in {measured}: {len(measured_losses)} of {len(shares)} points."
            )
        if not missing:
            return {share: measured_losses[share] for share in shares}
        model = self.load(self.trained, torch.bfloat16 if on_gpu else torch.float32)
        model.to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
        begin = monotonic()
        for number, share in enumerate(missing):
            rest = len(missing) - number
            seconds = (monotonic() - begin) / number * rest if number else 0.0
            to_go = f", about {format_duration(seconds)} to go" if number else ""
            log.info(f"Point {share:g}: {rest} of {len(shares)} left to measure{to_go}")
            self.put(model, share)
            measured_losses[share] = document_losses(model, rows, batch_size=8)
            if measured is not None:
                save_losses(measured / f"{share!r}.npz", measured_losses[share])
        return {share: measured_losses[share] for share in shares}

    def key(self, rows: Mapping[str, HeldOutSet], *, on_gpu: bool) -> str:
        """A hash of the weights of both ends, of the rows, and of the dtype of the computation."""
        digest = xxh3_128()
        for end in self.ends:
            for name, tensor in end.items():
                digest.update(name.encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        for name, of_set in rows.items():
            packed = cast(PackedRows, of_set.rows)
            documents = [name, packed.documents.digest, packed.packing_folder.name]
            digest.update(json.dumps([documents, on_gpu]).encode())
        return digest.hexdigest()

    def write(self, output: Path, *, share: float, dtype: torch.dtype | None) -> list[str]:
        """Write one point; returns a line about it."""
        model = self.load(self.trained, self.dtype)
        self.put(model, share)
        rounded_to(model, dtype or self.dtype).save_pretrained(output, max_shard_size=LARGEST_FILE)
        self.tokenizer.save_pretrained(output)
        carry_extension(self.trained.path, output)
        write_model_card(output, None, output.name)
        return [f"The point {share:g} on the line from the base to {self.trained.path}."]


def losses_in(folder: Path, shares: Sequence[float]) -> dict[float, dict[str, DocumentLosses]]:
    """The losses of the points that were measured before; damaged ones are measured again."""
    facts_of_models = {}
    for share in shares:
        with suppress(CheckpointError):
            if (path := folder / f"{share!r}.npz").is_file():
                facts_of_models[share] = load_losses(path)
    return facts_of_models


def refuse_unlike(base: Model, trained: Model) -> None:
    facts = list[dict[str, object]]()
    for end in (base, trained):
        config = load_config(end)
        weights = build_on_meta(config).state_dict()
        shapes = {weight_name: list(weight.shape) for weight_name, weight in weights.items()}
        same = {key: config.to_dict().get(key) for key in SAME_IN_BOTH}
        facts.append(
            {**same, **shapes, "the tokenizer": load_tokenizer(Tokenizer(), end).get_vocab()}
        )
    for name in facts[0] | facts[1]:
        first, second = (facts_of_model.get(name, "missing") for facts_of_model in facts)
        if first != second:
            values = "" if isinstance(first, dict) else f": {first} and {second}"
            remedy = "Use the base of the training; if the vocabulary grew, the one that `cpt tokenizer extend` wrote"
            raise CheckpointError(
                f"{name} differs between {base.path} and {trained.path}{values}. {remedy}."
            )


@dataclass(frozen=True)
class LinePoint:
    """A point's bits per byte on all sets of a kind together, compared with both ends: `base` and `trained`."""

    share: float
    domain: dict[str, Difference]
    general: dict[str, Difference] | None

    @property
    def place(self) -> tuple[float, float]:
        """Bits per byte of the domain and of general text; 0 without general text."""
        return self.domain["base"].after, self.general["base"].after if self.general else 0.0

    @property
    def helps(self) -> bool:
        """Whether, for each end, there is a kind of text on which the point is clearly better."""
        kinds = [kind for kind in (self.domain, self.general) if kind is not None]
        return all(
            any(kind[end].outcome() == "better" for kind in kinds) for end in ("base", "trained")
        )

    def is_on_frontier(self, points: Sequence["LinePoint"]) -> bool:
        """Whether no other point is as good on both kinds of text and better on one."""
        domain, general = self.place
        other_places = []
        for point in points:
            if point.place != self.place:
                other_places.append(point.place)
        return not any(point[0] <= domain and point[1] <= general for point in other_places)


def compare_points(
    losses: Mapping[float, Mapping[str, DocumentLosses]], general: Collection[str]
) -> list[LinePoint]:
    """Compare each point with both ends, the shares 0 and 1."""
    domain = [name for name in losses[0] if name not in general]
    general_sets = [name for name in losses[0] if name in general]

    def against_ends(share: float, names: list[str]) -> dict[str, Difference]:
        base = [losses[0][name] for name in names]
        point = [losses[share][name] for name in names]
        trained = [losses[1][name] for name in names]
        return {
            "base": bits_per_byte_difference(base, point),
            "trained": bits_per_byte_difference(trained, point),
        }

    line_points = []
    for share_of_point in losses:
        line_points.append(
            LinePoint(
                share_of_point,
                against_ends(share_of_point, domain),
                against_ends(share_of_point, general_sets) if general_sets else None,
            )
        )
    return line_points


def best_point(points: Sequence[LinePoint]) -> LinePoint | None:
    """The point with the lowest loss on general text among those that keep `KEPT_GAIN` of the domain gain, if it
    helps; the last point is the trained model."""
    gain = points[-1].domain["base"].difference
    candidates = []
    for candidate in points[1:-1]:
        if candidate.helps and candidate.domain["base"].difference <= KEPT_GAIN * gain:
            candidates.append(candidate)
    if gain < 0 and points[-1].general:
        return min(candidates, key=lambda point: point.place[1], default=None)
    return None


def conclusion(points: Sequence[LinePoint]) -> str:
    """One sentence: what the best point keeps, or that no point helps."""
    best = best_point(points)
    trained = points[-1]
    if trained.general is None:
        return "General text was not evaluated: add it to `evaluation.retain`, or with --text general=FILE."
    if not any(point.helps for point in points[1:-1]):
        return "No point helps: each may be no better than the base, or than the trained model (95 % intervals)."
    if best is None or best.general is None:
        return f"No point that is clearly better than the trained model keeps {KEPT_GAIN:.0%} of its domain gain."
    kept_gain = best.domain["base"].difference / trained.domain["base"].difference
    change, low, high = best.general["trained"].decides.percents
    return (
        f"Best point: {best.share:g} keeps {kept_gain:.0%} of the domain gain. Its bits per byte of general text are"
        f" {change:+.1f} % against the trained model's (95 % interval {low:+.1f} to {high:+.1f} %)."
    )
