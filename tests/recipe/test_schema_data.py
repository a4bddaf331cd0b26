import pytest
from pydantic import ValidationError

from cpt.recipe.schema_data import Data, Phase, Source


def test_a_data_section_needs_a_source():
    with pytest.raises(ValidationError, match="at least 1 item"):
        Data(sources=[])


def test_a_row_has_a_token_to_predict_and_a_source_a_path():
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        Data(sources=[Source(path="a.txt")], sequence_length=1)
    with pytest.raises(ValidationError, match="at least 1 character"):
        Source(path="")


@pytest.mark.parametrize("kind", ["exact", "near", "exact_across_sources", "near_across_sources"])
def test_copies_are_looked_for_in_four_ways(kind):
    assert Data(sources=[Source(path="a.txt")], deduplicate=kind).deduplicate == kind


@pytest.mark.parametrize("weights", [{"a": -1.0}, {"a": "half"}])
def test_weights_of_a_phase_are_numbers_from_zero_on(weights):
    with pytest.raises(ValidationError):
        Phase(weights=weights)
