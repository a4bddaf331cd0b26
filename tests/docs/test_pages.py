"""The commands and recipes of the documentation are right; the commands of the tutorials run."""

import re
from pathlib import Path

import pytest
from documented import PAGES, TUTORIALS, blocks_of, complaints, run_page
from prepared import prepare

from cpt.evaluation import sentences
from cpt.hardware import INSTALL_LINES

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "docker", "recipes", "launch", "deepspeed_configs", "cpt")
KINDS = ("*.md", "*.yaml", "*.py", "*Dockerfile", "*.sh", "*.sbatch")


def slow_or_long(page):
    is_long = page.stem == "four_a100" or page.parent.name == "howto"
    return pytest.param(page, marks=pytest.mark.long if is_long else pytest.mark.slow, id=str(page))


@pytest.mark.heavy
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=str)
def test_the_commands_and_recipes_of_a_page_are_right(page, tmp_path, monkeypatch):
    prepare(page.with_stem("no_page"), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "\n".join(complaints(page, tmp_path)) == ""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [slow_or_long(page) for page in TUTORIALS if any(block.is_run for block in blocks_of(page))],
)
def test_the_commands_of_a_tutorial_run(page, tmp_path):
    prepare(page, tmp_path)
    run_page(page, tmp_path)


def test_nvcc_is_only_for_compiling_flash_attn_and_mamba_kernels():
    """DeepSpeed's optimizer for the host needs g++ and ninja; a distribution's toolkit is of another CUDA version."""
    files = [path for folder in FOLDERS for kind in KINDS for path in (ROOT / folder).rglob(kind)]
    lines = [
        line for path in [*files, ROOT / "README.md"] for line in path.read_text().splitlines()
    ]
    about = [line for line in lines if re.search("nvcc|cuda-toolkit", line)]
    assert len(about) >= 6
    assert not [
        line
        for line in about
        if not re.search('flash-attn|nvcc is not needed|"nvcc"|toolkit-archive', line)
    ]


def test_the_installation_page_has_the_install_lines_of_doctor():
    page = (ROOT / "docs/howto/installing.md").read_text()
    assert all(INSTALL_LINES[name] in page for name in ("g++", "C compiler", "nvcc"))
    assert not any("apt-get install nvidia-cuda-toolkit" in line for line in INSTALL_LINES.values())


def test_each_next_step_of_a_verdict_is_in_the_table_of_next_steps():
    page = (ROOT / "docs/tutorials/your_documents.md").read_text()
    section = page.partition("### What to do after the verdict")[2].partition("\n## ")[0]
    remedies = [row.split(" | ")[-1] for row in section.splitlines() if row.startswith("| ")]
    table = plain("\n".join(remedies))
    steps = [text for text in vars(sentences).values() if str(text).startswith("Next: ")]
    things = ("domain text", "general text")
    steps = [step.format(thing) for step in steps for thing in things]
    assert len(set(steps)) >= 12
    missing = [
        step for step in steps if plain(step.removeprefix("Next: ").rstrip(".")) not in table
    ]
    assert missing == []


def plain(text):
    """Without marks of code and links."""
    return re.sub(r"`|\[([^]]*)\]\([^)]*\)", r"\1", text)
