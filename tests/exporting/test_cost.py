import math

import pytest
import torch

from cpt.checkpoints.model_card import Judgement
from cpt.exporting.cost import Bound, cost, gain_of
from cpt.exporting.judged_text import JudgedText

TEXT = JudgedText("a page", [[0, 1, 2, 3], [3, 2]], num_bytes=8)
LOGITS = [torch.randn(len(window), 5, generator=torch.Generator().manual_seed(len(window))) for window in TEXT.windows]


def giving(change):
    found = {len(logits): change(logits) for logits in LOGITS}
    return lambda ids: found[len(ids)]


def test_a_model_costs_nothing_against_itself():
    same = cost(LOGITS, giving(lambda logits: logits), TEXT, Bound(10**9, 0.5))
    assert (same.rise, same.agreement) == (0, 1) and same.divergence == pytest.approx(0, abs=1e-7) and same.is_allowed


def test_bits_per_byte_and_divergence_are_those_of_the_definition():
    found = cost(LOGITS, giving(torch.zeros_like), TEXT, Bound(10**9, 0.5))  # every token equally likely
    assert found.after == pytest.approx(4 * math.log2(5) / 8)
    old = torch.cat([logits[:-1].softmax(-1) for logits in LOGITS])
    assert found.divergence == pytest.approx((old * (old * 5).log()).sum(-1).mean().item(), rel=1e-5)


def test_a_vocabulary_padded_on_one_side_is_compared_on_the_common_tokens():
    padded = cost(
        LOGITS, giving(lambda logits: torch.nn.functional.pad(logits, (0, 3), value=9.0)), TEXT, Bound(10**9, 0.5)
    )
    assert padded.rise == pytest.approx(0, abs=1e-9)


def test_numbers_that_are_none_are_not_allowed():
    assert not cost(LOGITS, giving(lambda logits: logits * math.nan), TEXT, Bound(10**9, 0.5)).is_allowed


def test_a_quantised_model_may_lose_what_a_smaller_one_would():
    allowed, reason = Bound(7_000_000_000, 0.25).in_bits_per_byte(before=0.7, tokens_per_byte=0.25)
    nats = 482.01 * (1.75e9**-0.3478 - 7e9**-0.3478)
    assert allowed == pytest.approx(nats / math.log(2) * 0.25) and "25% of the parameters" in reason


def test_nothing_is_allowed_where_nothing_is_saved():
    assert Bound(10**9, 1.1).in_bits_per_byte(0.7, 0.25)[0] == 0


def test_half_of_a_small_gain_of_the_run_is_the_bound():
    allowed, reason = Bound(10**9, 0.25, gain=0.01).in_bits_per_byte(0.7, 0.25)
    assert allowed == 0.005 and "half of what the run gained, 0.0100" in reason


def test_the_users_own_limit_holds_alone():
    assert Bound(10**9, 0.25, gain=0.01, stated=0.1).in_bits_per_byte(0.7, 0.25) == (pytest.approx(0.07), "--max-rise")


def test_the_gain_of_a_run_is_its_largest_and_never_a_loss():
    judged = [Judgement("domain", 2.0, 1.6), Judgement("general", 2.0, 2.1), Judgement("unknown", None, 1.0)]
    assert gain_of(judged) == pytest.approx(0.4) and gain_of(judged[1:]) is None
