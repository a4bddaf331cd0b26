"""What `cpt data check` tells of examples: each kind of fault with its rows."""

from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.data.checking.files import filters_of, transforms_of
from cpt.data.checking.rows import POOL_BYTES
from cpt.data.encoders import encoder_of
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.examples.gate import CUT, REPEATED, WRONG, Findings, Inspector, inspect_source, missing_tokens
from cpt.data.parallel import num_workers
from cpt.data.sources import pieces_of
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.recipe.sense_data import reported_name

ROWS_SHOWN = 5
PIECE_BYTES = 2 * 2**20


@dataclass
class ExampleGate:
    """Looks through the sources of examples of a recipe.

    Args:
        truncated_share: of examples; more that do not fit into `data.sequence_length` are a mistake.
    """

    console: Console
    recipe: Recipe
    truncated_share: float

    @cached_property
    def encoder(self) -> DocumentEncoder:
        """The tokenizer's, loaded where there are examples."""
        from cpt.tokenizer.load import load_tokenizer  # seconds

        return DocumentEncoder(load_tokenizer(self.recipe.tokenizer, self.recipe.model))

    def check(self, source: DocumentSource, key: str) -> None:
        """Show what is found in a source.

        Raises:
            DataError: something in it makes training wrong.
            RecipeError: the tokenizer does not go with its template.
        """
        encoder = encoder_of(source, self.encoder, key)
        assert isinstance(encoder, ExampleEncoder)
        if missing := missing_tokens(encoder):
            raise RecipeError(
                f"`tokenizer.path`: the chat template of `{encoder.name}` writes {', '.join(missing)}, which is no"
                " token of the tokenizer: it would be spelled in pieces. Add it as a special token, or take the"
                " template that belongs to the tokenizer."
            )
        lists = filters_of(self.recipe.data, source, key), transforms_of(self.recipe.data, source, key)
        pieces = pieces_of(source, key, PIECE_BYTES)
        inspector = Inspector(source, key, *lists, encoder, self.recipe.data.sequence_length)
        found = inspect_source(inspector, pieces, num_workers() if len(pieces) * PIECE_BYTES >= POOL_BYTES // 4 else 0)
        if self.recipe.data.deduplicate is not None:
            found.counts.pop(REPEATED, None)
        self.show(reported_name(source), found)
        self.judge(source, key, found)

    def show(self, name: str, found: Findings) -> None:
        """A line for each kind, with its first rows."""
        if not found.counts:
            return
        table = Table(
            "rows",
            "fault",
            Column("which", overflow="fold"),
            title=f"{name}: {found.examples:,} examples",
            title_justify="left",
        )
        for kind, count in found.counts.most_common():
            more = f" and {count - ROWS_SHOWN:,} more" if count > ROWS_SHOWN else ""
            table.add_row(
                f"{count:,}", escape(kind), escape(", ".join(found.where(kind, ROWS_SHOWN)) + more), style="yellow"
            )
        self.console.print(table)

    def judge(self, source: DocumentSource, key: str, found: Findings) -> None:
        """Whether a run would learn what is wrong.

        Raises:
            DataError: with the kinds and their first rows.
        """
        cut = sum(found.counts[kind] for kind in CUT)
        is_much = cut > self.truncated_share * max(1, found.examples)
        wrong = [kind for kind in found.counts if kind in WRONG or kind in CUT and is_much]
        if not wrong:
            return
        told = "; ".join(f"{found.counts[kind]:,} x {kind} ({found.where(kind, 1)[0]})" for kind in wrong)
        much = (
            f" {cut / found.examples:.1%} do not fit into `data.sequence_length`: raise it (or --truncated-share)."
            if is_much
            else ""
        )
        raise DataError(f"{source.path}: {told}. Fix the rows or drop them by a filter (`{key}.filters`).{much}")
