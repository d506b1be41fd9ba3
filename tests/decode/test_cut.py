"""Where a step is cut: nothing after a stop token or past the limit is emitted or counted."""

from tests.decode.drafters import oracle_table
from tests.decode.driving import SHAPES, Batch, Request, run
from wmtp_jax.decode.drafter import Plain
from wmtp_jax.decode.sampling_params import SamplingParams


def test_a_step_that_a_stop_or_the_limit_cuts_counts_what_it_emitted():
    """Rows of right drafts, four tokens a step: one ends by its limit, one by its stop, one where a step ends."""
    shape = SHAPES[0]
    assert shape.gamma == 3
    model, sampling = shape.make(0), SamplingParams()
    prompts = [[7, 2, 40], [11, 3, 3, 19, 25], [30]]
    free = run(model, Plain(), Batch(shape, [Request(prompt, 5, -1, sampling) for prompt in prompts])).texts
    stop = free[1][2]
    assert stop not in free[1][:2]
    ends = [(3, -1), (5, stop), (5, -1)]
    batch = Batch(shape, [Request(p, *end, sampling) for p, end in zip(prompts, ends, strict=True)])
    outcome = run(model, shape.steered, batch, oracle_table(prompts, free, shape.capacities[0]))
    assert outcome.texts == [free[0][:3], free[1][:3], free[2]]
    assert outcome.accepted.tolist() == [0, 2, 0, 1]
