"""A mistake planted in a page is found without running it."""

from pathlib import Path

import pytest
from documented.pages import make_folder
from documented.reading import complaints_about


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "page"
    make_folder(folder)
    return folder


def complaint(text: str, folder: Path, tmp_path: Path) -> str:
    page = tmp_path / "page.md"
    page.write_text(text)
    return "\n".join(complaints_about(page, folder))


def block(text: str, language: str = "", comment: str = "needs: yours") -> str:
    return f"<!-- {comment} -->\n```{language}\n{text}\n```\n"


RIGHT = """
```
cpt check recipes/demo.yaml budget.tokens=100_000
for seed in 1 2; do cpt train recipes/demo.yaml seed=$seed > log; done
```

<!-- needs: nodes -->
```bash
export CPT_STORE=s3://bucket/prefix        # a comment
cpt launch RECIPE --nodes N --output launch/mine && sbatch launch/mine/job.sbatch
deepspeed --num_gpus 4 cpt/train.py recipes/production_multi_gpu.yaml seed=1
accelerate launch ... cpt/train.py recipe.yaml
torchrun --nproc_per_node 4 cpt/train.py recipe.yaml model.lora.r=8
python -m benchmarks.gpu.session --cases A B
make demo ARGS='--seeds 1'
pip install 'cpt[serving,report]'
```

The command `cpt merge --method lora | average` needs more words, `cpt COMMAND --help` tells them.

```yaml
rewards: [exact_match]
optimizer: {name: muon, learning_rate: 1e-3}
```
"""


def test_what_is_right_is_left_alone(folder, tmp_path):
    assert complaint(RIGHT, folder, tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (block("cpt trian recipe.yaml"), "no `cpt trian`"),
        (block("cpt train recipe.yaml --supervice"), "--supervice"),
        (block("cpt train"), "recipe"),
        (block("cpt train recipe.yaml --processes many"), "--processes"),
        (block("cpt data prewiev recipe.yaml"), "prewiev"),
        (block("cpt train recipes/dmo.yaml"), "no recipes/dmo.yaml"),
        (block("cpt train recipe.yaml budget.token=5"), "budget.token"),
        (block("cpt train recipes/tiny/sft.yaml optimizer.name=adamm"), "adamm"),
        (block("cpt train recipes/tiny/sft.yaml optimizer.momentum=0.9"), "momentum"),
        (block("cpt search recipes/tiny/sft.yaml --space recipes/search/tiny.yml"), "no recipes/search/tiny.yml"),
        (block("torchrun --nproc_per_nod=4 cpt/train.py r.yaml --supervice"), "--supervice"),
        (block("torchrun --bananas 4 cpt/train.py r.yaml"), "bananas"),
        (block("accelerate launch --config_file launch/none.yaml cpt/train.py r.yaml"), "launch/none.yaml"),
        (block("deepspeed --num_gpus four cpt/train.py r.yaml"), "num_gpus"),
        (block("python cpt/train.py r.yaml data.sequence_lenght=1"), "sequence_lenght"),
        (block("python -m benchmarks.gpus"), "benchmarks.gpus"),
        (block("python -m benchmarks.gpu.session --case Q"), "Q"),
        (block("make dmo"), "no target dmo"),
        (block("make demo ARG=1"), "no ARG"),
        (block("pip install 'cpt[servin]'"), "extra servin"),
        (block("docker build -f docker/none.Dockerfile ."), "docker/none.Dockerfile"),
        (block("sbatch launch/slurm_none.sbatch recipe.yaml"), "slurm_none"),
        (block("ctp train recipe.yaml"), "`ctp` is no command"),
        (block("cpt train 'recipe.yaml"), "quot"),
        (block("$ cpt verify\nall is well"), "Missing"),
        (block("all is well\n$ cpt verify RUN"), "before the first command"),
        ("```\ncpt train r.yaml --supervice\n```", "--supervice"),
        ("Then `cpt train --supervice` goes on.", "--supervice"),
        ("Then `cpt trian` goes on.", "no `cpt trian`"),
        ("Then `make dmo` shows it.", "no target dmo"),
        ("```yaml\nbugdet: {tokens: 5}\nstage: cpt\n```", "bugdet"),
        ("```yaml\nbudget: {token: 5}\n```", "`budget.token`"),
        ("```yaml\ndata:\n  filters: [{name: lenght}]\n```", "lenght"),
        ("```yaml\ndata:\n  filters: [{name: length, at_least: 5}]\n```", "at_least"),
        ("```yaml\nrewards: [exact_mach]\n```", "exact_mach"),
        ("```yaml\nstage: sft\ntraining: {pakcing: true}\n```", "pakcing"),
        ("```yaml\ndata: {filters: [], filters: []}\n```", "twice"),
        ("```yaml\nservices: {web: 1}\n```", "yaml: any"),
        ("```yaml\nname: x\nsteps: [{recipe: recipes/none.yaml}]\n```", "none.yaml"),
        ("```yaml\nsearch: {metric: loss}\noptimizer.learning_rate: {low: 1}\n```", "high"),
        ("```json\n{'a': 1}\n```", "page.md:1"),
        ("```toml\na = \n```", "page.md:1"),
        ("```python\nprint(\n```", "page.md:1"),
        (block("from cpt.train import trian", "python"), "no trian"),
        (block("from cpt.trian import train", "python"), "cpt.trian"),
    ],
)
def test_a_planted_mistake_is_found(text, said, folder, tmp_path):
    assert said in complaint(text, folder, tmp_path)
