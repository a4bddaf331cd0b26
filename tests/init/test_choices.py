import pytest

from cpt.errors import DataError, ResourceError
from cpt.init.choices import choose, evaluations, held_out_share, length_of_run, round_down, size_in_words
from cpt.init.documents import TokenEstimate
from cpt.models.inventory import flops_per_token
from cpt.planner.target import find_target


@pytest.fixture
def choices(base_of, facts, estimate):
    def of(shape="0.5b", gpu="RTX 4090", path="some/base", gpus=1, found=estimate, **options):
        return choose(facts, found, base_of(shape, path), find_target(gpu, gpus, 64.0), **options)

    return of


@pytest.mark.slow
def test_text_that_the_tokenizer_fits_is_a_weak_shift_and_other_text_a_strong_one(choices):
    weak = choices()
    strong = choices(found=TokenEstimate(10**8, 10**8, 10**8, 400, 2.4, 0.6))
    assert (weak.is_strong_shift, weak.replay, strong.is_strong_shift, strong.replay) == (False, 0.05, True, 0.25)
    assert "95 % of plain English" in weak.shift_reason


def test_few_tokens_are_gone_through_more_often_but_never_more_than_four_times():
    assert [length_of_run(tokens, 0.05, None)[0] for tokens in (10**6, 10**8, 10**9)] == [4, 2, 1]
    epochs, tokens = length_of_run(10**8, 0.25, None)
    assert tokens == pytest.approx(epochs * 10**8 / 0.75, rel=0.05)
    assert length_of_run(10**8, 0.5, 10**8) == (0.5, 10**8)


@pytest.mark.long
def test_the_batch_divides_and_there_are_steps_enough(choices):
    for found in (choices(), choices(gpu="H100"), choices("8b", "A100-80GB", gpus=4)):
        at_once = (
            found.fit.micro_batch * found.sequence_length * (4 if "zero1" in str(found.fit.method.profile) else 1)
        )
        assert found.batch_tokens % at_once == 0 and found.steps >= 50 and found.warmup_tokens <= 0.03 * found.tokens


@pytest.mark.slow
def test_a_known_base_goes_on_at_the_rate_it_ended_at(choices):
    known = choices(path="meta-llama/Llama-2-7b-hf")
    assert known.rate.value == 3e-5 and "arXiv 2307.09288" in known.rate.reason and known.sequence_length == 4096
    peak = choices(path="meta-llama/Llama-3.1-8B")
    assert peak.rate.value == pytest.approx(3e-5) and "a tenth of the base's own peak, 0.0003" in peak.rate.reason
    assert "not known here" in choices().rate.reason


@pytest.mark.long
def test_for_far_text_the_rate_goes_up_again(choices):
    far = TokenEstimate(10**8, 10**8, 10**8, 400, 2.4, 0.6)
    known = choices(path="meta-llama/Llama-2-7b-hf", found=far)
    assert (
        known.rate.value == pytest.approx(9e-5)
        and "0.3 of the base's own peak, 0.0003 (arXiv 2307.09288" in known.rate.reason
    )
    assert choices(found=far).rate.value == pytest.approx(3 * choices().rate.value)
    assert "about 0.3 of the peaks" in choices(found=far).rate.reason


@pytest.mark.slow
def test_the_user_may_know_better_how_far_the_text_is(choices):
    strong = choices(shift="strong")
    assert strong.is_strong_shift and strong.shift_reason == "as you say" and strong.replay == 0.25
    assert not choices(found=TokenEstimate(10**8, 10**8, 10**8, 400, 2.4, 0.6), shift="weak").is_strong_shift


@pytest.mark.slow
def test_on_a_cpu_rows_go_through_one_by_one_before_steps_become_few(choices):
    few = TokenEstimate(400_000, 400_000, 400_000, 400, 4.2, 0.95)
    assert choices("0.5b", "cpu", found=few).steps >= 400 > choices("0.5b", "H100", found=few).steps


def test_held_out_documents_are_read_as_often_as_a_tenth_of_the_time_allows():
    assert [evaluations(held_out, 1_000_000) for held_out in (1_000, 60_000, 100_000, 10**6)] == [5, 5, 3, 1]


@pytest.mark.slow
def test_adapters_learn_ten_times_faster_and_embeddings_as_slowly_as_before(choices):
    full, lora = choices(), choices(full=False)
    assert lora.rate.value == pytest.approx(10 * full.rate.value) and lora.embedding_rate == pytest.approx(
        full.rate.value
    )
    assert full.embedding_rate is None


@pytest.mark.long
def test_rows_are_as_long_as_the_base_had_them(choices):
    assert choices(path="EleutherAI/pythia-410m").sequence_length == 2048
    assert choices().sequence_length == 4096 and choices("mamba", "cpu").sequence_length == 512


@pytest.mark.long
def test_an_architecture_that_cannot_be_packed_gets_rows_that_are_batches(choices):
    assert choices("mamba", "RTX 4090").fit.micro_batch == 1


@pytest.mark.long
def test_what_fits_nowhere_is_refused_with_all_that_was_tried(choices):
    with pytest.raises(
        ResourceError,
        match=(
            "does not fit RTX 4080 x 1: training all parameters needs .*; LoRA needs .*Take a smaller model, more GPUs"
        ),
    ):
        choices("8b", "RTX 4080")


def test_adapters_for_a_model_that_has_no_place_for_them_are_refused(choices):
    with pytest.raises(ResourceError, match="has no linear layers that adapters could be put on. Leave out --lora"):
        choices("no layers", full=False)


def test_sizes_are_told_in_words():
    assert [size_in_words(number) for number in (8_030_261_248, 494_000_000, 167_772_160, 39_000)] == [
        "8B parameters", "490M parameters", "170M parameters", "0.039M parameters",
    ]  # fmt: skip


def test_too_little_text_is_refused(choices):
    with pytest.raises(DataError, match="its 2,000 tokens make 1 steps of 4,096 tokens, too few to learn from"):
        choices(found=TokenEstimate(2000, 2000, 2000, 60, 4.2, 1.0))


@pytest.mark.parametrize("documents", [50, 500, 10**6])
def test_enough_documents_are_held_out_and_not_too_many(documents):
    assert 10 <= round(held_out_share(documents) * documents) <= max(100, 0.0051 * documents)


def test_the_cost_is_operations_by_the_peak_at_an_assumed_efficiency(choices, base_of):
    found = choices(gpu="H100")
    base = base_of("0.5b")
    seconds = (
        found.tokens * flops_per_token(base.model, 4096) / (989.4e12 * 0.35) * (1.27 if found.fit.checkpointing else 1)
    )
    assert 1 < found.cost.hours / (seconds / 3600) < 1.05, "and the updates"
    assert found.cost.low < found.cost.hours < found.cost.high


def test_operations_are_six_for_each_weight_and_attention(base_of):
    base = base_of("8b")
    norms = (2 * 32 + 1) * 4096
    expected = 6 * (base.parameters - 128256 * 4096 - norms) + 6 * 32 * 4096 * 4096
    assert flops_per_token(base.model, 4096) == pytest.approx(expected, rel=1e-6)
    assert flops_per_token(base.model, 4096, trains_weights=False) < expected


def test_rounding_keeps_two_digits():
    assert [round_down(number) for number in (7, 99, 1234, 1_299_999)] == [7, 99, 1200, 1_200_000]
