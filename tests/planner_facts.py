"""A model whose sums can be made with a pencil: 1,000 numbers, of which 100 are the head's."""

from cpt.planning.model_sizes import ModelFacts

FACTS = ModelFacts(
    name="llama",
    parameters=1000,
    active=1000,
    trained=1000,
    head=100,
    vocabulary=50,
    hidden=2,
    largest_matrix=100,
    largest_layer=300,
    embedding=100,
    is_tied=False,
    flops_per_token=6000,
    has_fused_loss=True,
)
