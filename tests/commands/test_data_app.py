import subprocess
import sys

HELP = """
import sys
from cpt.cli import main
try:
    main(["data", "ingest", "--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""


def test_converting_documents_needs_no_torch():
    subprocess.run([sys.executable, "-c", HELP], capture_output=True, check=True)
