"""What the phases of a step must move and compute, from shapes alone."""

from wmtp_jax.bench.options import StepOptions
from wmtp_jax.config import ModelConfig
from wmtp_jax.plan.memory import position_bytes
from wmtp_jax.plan.roofline import Setting, Work, draft_work, extend_work, verify_work
from wmtp_jax.plan.sizes import sizes_of_config


def phase_work(config: ModelConfig, options: StepOptions, context: int, mode: str) -> dict[str, Work]:
    """Bytes and products of each phase of ``bench.phases``."""
    sizes, setting = sizes_of_config(config), _setting(options, context)
    tokens = 1 if mode == "plain" else options.gamma + 1
    verify = verify_work(sizes, setting, tokens)
    keys = options.rows * context * sizes.attention_layers
    attention = Work(
        0.0,
        keys * position_bytes(sizes, setting.cache),
        4.0 * sizes.num_heads * sizes.head_dim * keys * tokens,
        sizes.attention_layers,
    )
    # A commit reads and writes the recurrent states, which verifying has counted already.
    target = {"verify": verify, "commit": Work(0.0, 0.0, 0.0, 0), "attention": attention}
    if mode == "plain":
        return target
    window = (options.window, options.sink) if mode == "windowed" else (0, 0)
    return {
        "draft_extend": extend_work(sizes, setting),
        "draft_decode": draft_work(sizes, setting, *window),
        **target,
    }


def step_work(phases: dict[str, Work]) -> Work:
    """The whole step's; attention is part of verifying."""
    parts = [work for name, work in phases.items() if name in ("draft_extend", "draft_decode", "verify")]
    return Work(*(sum(values) for values in zip(*parts, strict=True)))


# The names that planning has for dtypes.
_FORMATS = {
    "float32": "float32",
    "bfloat16": "bf16",
    "float16": "float16",
    "int8": "int8",
    "float8_e4m3fn": "fp8",
}


def _setting(options: StepOptions, context: int) -> Setting:
    weights, cache = _FORMATS[options.dtype], _FORMATS[options.cached]
    return Setting(weights=weights, cache=cache, context=context, rows=options.rows, gamma=options.gamma)
