"""The fused loss and the scores of held-out text are those of the model itself, in each causal family of transformers.

`CPT_RENEW_APPROVED=1 pytest -m slow FILE` writes the table of families.
"""

import os
from pathlib import Path

import pytest
import torch
import yaml
from approved import RENEW
from causal_families import FAMILIES, small_model
from torch.nn import functional as F

from cpt.errors import RecipeError
from cpt.models.fused_loss import FusedLoss, fused_scores, refuse_unshifted_labels, why_not_fused

TABLE = Path(__file__).with_name("approved_fused_families.txt")
IGNORED = -100
FUSED = "fused"
CHANGES_LOGITS = "cohere gemma2 hyperclovax inkling2_text inkling_text recurrent_gemma xlstm"


def read_table() -> dict[str, str]:
    return dict(line.split(": ", 1) for line in TABLE.read_text().splitlines())


def padded_batch():
    """Two rows, the second padded; the first tokens of the first row have no labels."""
    ids = torch.randint(4, 88, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 20:], mask[1, 20:] = 0, 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, :5] = IGNORED
    return {"input_ids": ids, "attention_mask": mask}, labels


def spread_logits(model):
    """Give logits the size of a trained model's, so that a cap or a factor changes the loss."""
    head = model.get_output_embeddings()
    if head is not None:
        with torch.no_grad():
            head.weight.normal_(0, 3)


def loss_and_gradients(model, batch, labels):
    torch.manual_seed(2)
    loss = model(**batch, labels=labels, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    ends = [model.get_input_embeddings().weight, *model.get_output_embeddings().parameters()]
    return loss, [end.grad.clone() for end in ends if end.grad is not None]


def compare_with_the_models_own(family: str) -> str:
    """Return `fused`, or why the family is refused, or not built here."""
    try:
        model = small_model(family)
        batch, labels = padded_batch()
        with torch.no_grad():
            model.eval()(**batch, use_cache=False)
    except Exception as problem:
        reason = " ".join(str(problem).split())
        return f"not built: {reason[:80].strip()}"
    spread_logits(model)
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
        with fused_scores(model) as fused:
            scored = None if fused is None else fused.score(model, batch, labels)
    if scored is not None:
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()
        nats = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        torch.testing.assert_close(scored[0].flatten(), nats, rtol=1e-4, atol=1e-5)
    try:
        refuse_unshifted_labels(model)
    except RecipeError as problem:
        return f"refused: {problem}"
    assert why_not_fused(model) is None
    assert scored is not None, "its logits are changed in an unknown way"
    model.train()
    loss, gradients = loss_and_gradients(model, batch, labels)
    FusedLoss(model, tokens=7)
    fused_loss, fused_gradients = loss_and_gradients(model, batch, labels)
    torch.testing.assert_close(fused_loss, loss, rtol=1e-5, atol=1e-6)
    for found, expected in zip(fused_gradients, gradients, strict=True):
        assert (found - expected).norm() < 1e-4 * expected.norm()
    return FUSED


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in CHANGES_LOGITS.split() else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_loss_gradients_and_scores_are_the_models_own(family):
    outcome = compare_with_the_models_own(family)
    if os.environ.get(RENEW):
        table = (read_table() if TABLE.exists() else {}) | {family: outcome}
        TABLE.write_text("".join(f"{name}: {table[name]}\n" for name in FAMILIES if name in table))
    assert outcome == read_table()[family]


def test_the_families_of_all_shipped_recipes_are_fused():
    table = read_table()
    recipes = Path("recipes/models").rglob("*.yaml")
    shipped = {yaml.safe_load(path.read_text())["config"]["model_type"] for path in recipes}
    assert shipped and {table[family] for family in shipped} == {FUSED}
