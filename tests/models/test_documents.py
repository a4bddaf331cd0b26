import pytest
import torch
from tiny_models import make_tokenizer, tiny_config
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from cpt.models.attention import (
    BOUNDS,
    FEWEST_BOUNDS,
    LONGEST,
    add_document_bounds,
    document_bounds,
    hand_over_documents,
    wants_bounds,
)
from cpt.models.build import build_model
from cpt.recipe.schema import Model


def positions_of(*rows):
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


def tiny(attention, model_type="llama", **section):
    return build_model(
        Model(from_scratch=True, config=tiny_config(model_type), attention=attention, **section),
        make_tokenizer(),
        seed=1,
    )


def handed_over(**given):
    return hand_over_documents(torch.nn.Identity(), (), given)[1]


def test_bounds_are_of_the_documents_of_all_rows():
    bounds = document_bounds(positions_of((5, 3, 3), (11,)))
    assert bounds.dtype == torch.int32 and len(bounds) == FEWEST_BOUNDS
    assert bounds[:6].tolist() == [0, 5, 8, 11, 22, 22] and bounds.max() == bounds[-1] == 22


@pytest.mark.parametrize("number", [2, 63, 64, 200])
def test_bounds_are_what_transformers_takes_from_the_positions_of_a_row(number):
    positions = positions_of(torch.randint(1, 9, (number,), generator=torch.Generator().manual_seed(number)).tolist())
    (theirs, _), _ = prepare_fa_kwargs_from_position_ids(positions)
    bounds = document_bounds(positions)
    assert torch.equal(bounds[: len(theirs)], theirs) and (bounds[len(theirs) :] == positions.numel()).all()
    assert len(bounds).bit_count() == 1, "few different shapes"


def test_a_row_that_begins_inside_a_document_ends_the_one_of_the_row_before():
    assert document_bounds(torch.tensor([[0, 1, 2], [3, 4, 0]]))[:4].tolist() == [0, 3, 5, 6]


def test_the_hook_takes_bounds_from_the_batch_or_makes_them():
    positions, ids = positions_of((3, 1)), torch.ones(1, 4)
    given = torch.tensor([0, 1, 4], dtype=torch.int32)
    assert handed_over(input_ids=ids, position_ids=positions, **{BOUNDS: given})["attention_mask"].tolist() == [
        [[[0, 1, 4]] * 4]
    ]
    assert handed_over(input_ids=ids, position_ids=positions)["attention_mask"].flatten()[:3].tolist() == [0, 3, 4]
    several = handed_over(inputs_embeds=torch.ones(2, 4, 8), position_ids=positions)  # one row of positions for all
    assert several["attention_mask"].flatten()[:5].tolist() == [0, 3, 4, 7, 8]


@pytest.mark.parametrize(("longest", "rounded"), [(1, 128), (128, 128), (129, 256), (300, 512), (600, 1024)])
def test_the_longest_document_is_rounded_up_and_a_dimension_of_the_mask(longest, rounded):
    batch = add_document_bounds({"input_ids": torch.ones(1, 600), "position_ids": torch.arange(600)[None] % longest})
    mask = handed_over(**batch)["attention_mask"]
    assert mask.shape[2] == rounded and mask.untyped_storage().nbytes() <= 4 * 1024


@pytest.mark.parametrize(
    "other", [{"attention_mask": torch.ones(1, 4)}, {"past_key_values": object()}, {"position_ids": None}]
)
def test_masks_and_caches_are_left_as_they_are(other):
    given = {
        "input_ids": torch.ones(1, 4),
        "position_ids": positions_of((3, 1)),
        BOUNDS: document_bounds(positions_of((3, 1))),
    } | other
    given[LONGEST] = 128
    assert handed_over(**given) == {name: value for name, value in given.items() if name not in (BOUNDS, LONGEST)}


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_batches_bring_bounds_only_where_the_model_hands_them_on(lora):
    assert wants_bounds(tiny("varlen", lora=lora))
    assert not wants_bounds(tiny("sdpa", lora=lora)) and not wants_bounds(torch.nn.Linear(1, 1))
