"""Make the picture in the README, docs/images/verdict.svg, from what `cpt verdict RUN` prints:
`python -m docs.make_picture RUN`.
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from cpt.commands.verdict import show
from cpt.evaluation.evaluate import complete_verdict
from cpt.runs.record import Run

PICTURE = Path(__file__).parent / "images/verdict.svg"

if __name__ == "__main__":
    run = Run(Path(sys.argv[1]))
    console = Console(file=io.StringIO(), record=True, width=126, highlight=False)
    console.print(f"$ cpt verdict {run.folder}", style="bold")
    show(complete_verdict(run, batch_size=8), run, console)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(console.export_svg(title="cpt verdict"))
