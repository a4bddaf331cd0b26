"""A model and an adapter, as runs leave them; no training."""

from pathlib import Path

from guide_texts import manuals
from tiny_checkpoints import save_adapter, save_llama

from cpt.tokenizer.train_bpe import train_bpe

SUITE = "quantized"


def prepare(folder: Path) -> None:
    """`runs/chemist`, and `runs/chemist-lora` on `base`."""
    texts = ["\n".join(passages) for passages in manuals(10).values()]
    train_bpe(texts, 400, folder / "tokenizer")
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
    save_llama(folder / "runs" / "chemist", folder / "tokenizer", seed=0, **shape)
    save_llama(folder / "base", folder / "tokenizer", seed=1, **shape)
    save_adapter(folder / "runs" / "chemist-lora", folder / "base")
    (folder / "page.txt").write_text("\n".join(texts), encoding="utf-8")
