"""Configs of other tools, and what became of their keys."""

from pathlib import Path
from typing import Any

from cpt.importing.command import Tool
from cpt.importing.ledger import Ledger

CONFIGS = Path(__file__).parent / "importing" / "configs"
SMALLEST: dict[Tool, dict[str, Any]] = {
    Tool.AXOLOTL: {"base_model": "example/base", "datasets": [{"path": "example/texts", "type": "completion"}]},
    Tool.LLAMAFACTORY: {
        "model_name_or_path": "example/base",
        "stage": "pt",
        "dataset": "example/texts",
        "dataset_dir": "ONLINE",
    },
}


def result(ledger: Ledger) -> dict[str, tuple[str, str]]:
    """Key -> what became of it."""
    return {entry.key: (entry.verdict, entry.told) for entry in ledger.entries}
