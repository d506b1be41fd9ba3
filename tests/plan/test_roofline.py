"""A step's cost against the sums written out by hand, and its shape over contexts."""

import dataclasses

import numpy as np
import pytest

from wmtp_jax.plan.hardware import HARDWARE, Hardware
from wmtp_jax.plan.roofline import CALIBRATED, ROOFLINE, Constants, Setting, plain_step, speculative_step
from wmtp_jax.plan.sizes import ModelSizes, Weights

# Every number is distinct, so that no two can be swapped unseen.
SIZES = ModelSizes(
    target=Weights(embedding=1000, head=1001, experts=8000, projections=3000, recurrent=500, small=70, float32=9),
    draft=Weights(experts=800, projections=310, small=17, float32=2),
    attention_layers=3,
    draft_layers=1,
    num_heads=12,
    num_kv_heads=2,
    head_dim=7,
    num_experts=4,
    top_k=1,
    state_elements=130,
    tail_elements=11,
    extend_parameters=41,
    max_positions=10**6,
)
SLOW_MEMORY = dataclasses.replace(HARDWARE["h200"], bandwidth=1e3, matrix_flops=1e30)
SLOW_MATRICES = dataclasses.replace(HARDWARE["h200"], bandwidth=1e30, matrix_flops=1e3)
CONSTANTS = Constants(name="mine", attention_efficiency=0.5, launch_s=3.0)


def setting(context: int, *, rows: int = 2, gamma: int = 3) -> Setting:
    return Setting(weights="bf16", cache="bf16", context=context, rows=rows, gamma=gamma)


def test_a_step_bound_by_memory_takes_the_time_of_its_bytes() -> None:
    step = speculative_step(SIZES, setting(50), SLOW_MEMORY, CONSTANTS, window=0, sink=0)
    entry = 2 * 2 * 7 * 2
    draft = 2 * (1001 + 800 * (1 - (3 / 4) ** 2) + 310 + 17) + 4 * 2
    target = 2 * (1001 + 8000 * (1 - (3 / 4) ** 8) + 3000 + 500 + 70) + 4 * 9 + 2 * 130 * 4 * 2
    assert step.draft_extend_ms == pytest.approx(41 * 2 + 3e3)
    assert step.draft_decode_ms == pytest.approx(3 * (draft + 2 * (50 + 2) * entry / 0.5 + 3e3))
    assert step.verify_ms == pytest.approx(target + 2 * 50 * 3 * entry / 0.5 + 3e3)
    assert step.step_ms == pytest.approx(step.draft_extend_ms + step.draft_decode_ms + step.verify_ms)


def test_a_step_bound_by_arithmetic_takes_the_time_of_its_products() -> None:
    step = speculative_step(SIZES, setting(50), SLOW_MATRICES, ROOFLINE, window=20, sink=4)
    draft = 2 * (1001 + 800 / 4 + 310 + 17 + 2)
    target = 2 * (1001 + 8000 / 4 + 3000 + 500 + 70 + 9) + 7 * 130
    assert step.draft_extend_ms == pytest.approx(2 * 41 * 8)
    assert step.draft_decode_ms == pytest.approx(3 * 2 * (draft + 4 * 12 * 7 * (24 + 2)))
    assert step.verify_ms == pytest.approx(8 * (target + 4 * 12 * 7 * 3 * 50))


def test_plain_decoding_is_one_token_a_row() -> None:
    step = plain_step(SIZES, setting(50, rows=1), SLOW_MEMORY, ROOFLINE)
    read = 2 * (1001 + 8000 / 4 + 3000 + 500 + 70) + 4 * 9 + 2 * 130 * 4
    assert (step.draft_extend_ms, step.draft_decode_ms) == (0, 0)
    assert step.step_ms == pytest.approx(read + 50 * 3 * 2 * 2 * 7 * 2)


def test_a_tied_head_is_read_like_any_other() -> None:
    tied = dataclasses.replace(SIZES, target=SIZES.target._replace(embedding=1001, head=0))
    both = [speculative_step(s, setting(9), SLOW_MEMORY, ROOFLINE, window=0, sink=0).step_ms for s in (tied, SIZES)]
    assert both[0] == pytest.approx(both[1])


@pytest.mark.parametrize("constants", [ROOFLINE, CALIBRATED])
@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=lambda hardware: hardware.name)
def test_windowed_draft_cost_is_constant_and_native_cost_is_linear(hardware: Hardware, constants: Constants) -> None:
    contexts = np.array([2**10, 2**14, 2**17, 2**20])
    native, windowed = (
        np.array(
            [
                speculative_step(
                    SIZES, setting(int(context)), hardware, constants, window=window, sink=8
                ).draft_decode_ms
                for context in contexts
            ]
        )
        for window in (0, 500)
    )
    assert len(set(windowed)) == 1
    slopes = np.diff(native) / np.diff(contexts)
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-6)
    assert slopes[0] > 0
    assert np.all(native > windowed)


def test_a_window_that_covers_the_context_costs_what_native_does() -> None:
    steps = [
        speculative_step(SIZES, setting(100), HARDWARE["h200"], ROOFLINE, window=window, sink=sink)
        for window, sink in ((0, 0), (90, 10), (89, 10))
    ]
    assert steps[0] == steps[1]
    assert steps[2].draft_decode_ms < steps[1].draft_decode_ms


def test_calibrated_costs_are_never_below_the_floor() -> None:
    for hardware in HARDWARE.values():
        for context in (10, 10**6):
            floor, calibrated = (
                speculative_step(SIZES, setting(context), hardware, constants, window=64, sink=4)
                for constants in (ROOFLINE, CALIBRATED)
            )
            assert calibrated.draft_extend_ms > floor.draft_extend_ms
            assert calibrated.draft_decode_ms > floor.draft_decode_ms
            assert calibrated.verify_ms > floor.verify_ms
