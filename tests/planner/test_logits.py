from dataclasses import replace

from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.logits import logits_before, logits_of, scored_tokens
from cpt.planner.stages import PAIRS, SCORE, TAUGHT, TAUGHT_IN_TILES, TILES, Beside

SETUP = replace(PLAIN, sequence_length=8, micro_batch=2, half=False, weights_bytes=4)


def beside(kind, **changes):
    return replace(SETUP, beside=Beside("any", kind, **changes))


def size(terms):
    return sum(term.size for term in terms)


def test_a_score_has_no_logits():
    assert logits_of(FACTS, beside(SCORE)) == () and logits_before(FACTS, beside(SCORE)) == ()


def test_tiles_have_their_own_width_and_gradients_in_fp32():
    tile = 4 * 16 * 32768
    assert size(logits_before(FACTS, beside(TILES))) == tile
    assert size(logits_of(FACTS, beside(TILES))) == tile + 4 * 16 * 2 + 4 * 100
    assert size(logits_of(FACTS, replace(beside(TILES), lora={"r": 1}))) == tile + 4 * 16 * 2
    many = replace(beside(TILES), sequence_length=8192)
    assert size(logits_before(FACTS, many)) == 4 * 4096 * 32768


def test_only_what_the_model_wrote_is_scored_on_a_gpu():
    written = beside(TILES, completion=3)
    assert scored_tokens(written) == 6 and scored_tokens(replace(written, on_cpu=True)) == 22
    assert scored_tokens(replace(beside(TAUGHT_IN_TILES, completion=3), on_cpu=True)) == 6
    assert scored_tokens(beside(TILES, sequences=2)) == 32


def test_pairs_and_teachers_have_whole_logits():
    pairs = size(logits_of(FACTS, beside(PAIRS, sequences=2)))
    assert pairs == 13.5 * 32 * 50 + 400
    assert size(logits_of(FACTS, beside(TAUGHT))) == (11 + 20) * 16 * 50 + 400
    assert size(logits_before(FACTS, beside(PAIRS, sequences=2))) < pairs
