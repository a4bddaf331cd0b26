"""`cpt export --quantize`: the whole export first, then the quantised one made of it, which alone is kept."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from cpt.checkpoints.model_folder import weight_files
from cpt.checkpoints.proof import proof_text
from cpt.checkpoints.proven_export import Wish, export_whole, name_of, written_whole_or_not
from cpt.checkpoints.trained import Trained
from cpt.exporting.card import add_section
from cpt.exporting.judged_text import judged_text
from cpt.exporting.judging import Judge, gain_of_run
from cpt.exporting.quantised import Method, bytes_of, write_quantised

OF_THE_WHOLE = ("Wrote", "Serve")  # lines that are about a folder that goes away


def export_quantised(
    trained: Trained, output: Path, wish: Wish, method: Method, max_rise: float | None
) -> Iterator[str]:
    """Yields what there is to tell as it becomes known.

    Raises:
        CheckpointError: it cannot be proven, or it costs too much; then no folder is left behind.
    """
    scratch = output.with_name(f".{output.name}.whole")
    whole = scratch / output.name  # the card takes its name from the folder's
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for line in export_whole(trained, whole, wish):
            if not line.startswith(OF_THE_WHOLE):
                yield line
        tokenizer, config = AutoTokenizer.from_pretrained(whole), AutoConfig.from_pretrained(whole)
        judge = Judge(judged_text(trained, tokenizer, config, wish.text), wish.dtype, gain_of_run(trained), max_rise)
        with written_whole_or_not(output) as unfinished:
            copy_beside(whole, unfinished)
            told = list(
                write_quantised(
                    whole, unfinished, method, judge, proof_text(tokenizer, config, wish.text), wish.max_shard_size
                )
            )
            told.append(f"Judged on {judge.text.num_predicted:,} tokens of {judge.text.where}.")
            yield from told
            sizes = (
                f"{bytes_of(whole) / 1e6:,.1f} MB of {name_of(wish.dtype)} -> {bytes_of(unfinished) / 1e6:,.1f} MB "
                f"({bytes_of(unfinished) / bytes_of(whole):.0%})"
            )
            add_section(unfinished, "Quantised", [*told, f"Size: {sizes}."])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    yield f"Wrote {output}: {method}, {sizes}, with README.md."
    yield f"Serve it: cpt serve {output}"


def copy_beside(whole: Path, folder: Path) -> None:
    """All that lies beside the weights: tokenizer, configs (which saving the quantised model completes), model
    card."""
    folder.mkdir(parents=True)
    weights = {file.name for file in weight_files(whole)}
    for file in whole.iterdir():
        if file.name not in weights and not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)
