"""The sections of ``gpu_check``: each yields one dictionary a figure, as soon as it has it."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wmtp_jax.bench.timing import seconds_of
from wmtp_jax.cache.paged import quantize
from wmtp_jax.errors import UserError

IMPLEMENTATIONS = ("xla", "mosaic_gpu")
_EIGHT_BITS = ("int8", "float8_e4m3fn")
# Largest absolute errors against the float32 reference; weighted means of unit normal values.
_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4, "int8": 2e-2, "float8_e4m3fn": 2e-2}


class Sizes(NamedTuple):
    """Shapes of the 35B and, for state-space duality, of a Nemotron 3 Super; or toys of the same form."""

    kv_heads: int = 2
    groups: int = 8
    head_dim: int = 256
    pages: tuple[int, ...] = (64, 256)
    lengths: tuple[int, ...] = (16000, 4097, 0, 300)
    run: int = 7
    chunk: int = 512
    sink: int = 64
    window: int = 4032
    native: int = 16384
    delta_heads: int = 32
    delta_dim: int = 128
    ssd_heads: int = 128
    ssd_groups: int = 8
    ssd_width: int = 64
    ssd_size: int = 128
    long: int = 1 << 20
    copy_bytes: int = 1 << 31
    matrix: int = 8192


_DRY = Sizes(1, 2, 64, (64,), (100, 0), 3, 20, 3, 70, 80, 1, 64, 2, 1, 64, 64, 200, 1 << 20, 256)


def measure(name: str, dry_run: bool) -> Iterator[dict]:
    """The figures of a section. Raises UserError on a machine without a GPU, unless it is a dry run."""
    if not dry_run and jax.default_backend() != "gpu":
        raise UserError(f"needs a GPU and JAX found a {jax.default_backend().upper()}; --dry-run runs anywhere")
    section = {
        "machine": _machine,
        "paged_attention": _paged,
        "sink_window_attention": _ring,
        "gated_delta_rule": _delta,
        "mamba2_ssd": _ssd,
        "bandwidth": _bandwidth,
        "verify_attention": _verify,
        "other_kernels": _others,
    }[name]
    yield from section(_DRY if dry_run else Sizes(), dry_run)


def _machine(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    yield {"name": device.device_kind, "compute_capability": capability, "jax": jax.__version__}


def operation(op: str, implementation: str, dry_run: bool) -> Callable | None:
    """The op behind its front door; a GPU kernel interpreted in a dry run, or None where there is no interpreter."""
    if not (dry_run and implementation == "mosaic_gpu"):
        return partial(getattr(importlib.import_module(f"pallas_kernels.{op}"), op), implementation=implementation)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):
        return None
    function = getattr(importlib.import_module(f"pallas_kernels.{op}.mosaic_gpu"), op)
    return partial(function, interpret=plgpu.InterpretGPUParams())  # pyright: ignore


def _compare(op: str, case: str, dtype: str, dry_run: bool, args: tuple, **named: Any) -> Iterator[dict]:
    """Every implementation against the reference."""
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(_first(operation(op, "reference", dry_run), named))(*args)
    for implementation in IMPLEMENTATIONS:
        result: dict[str, Any] = {"name": f"{op}, {case}, {dtype}, {implementation}"}
        function = operation(op, implementation, dry_run)
        if function is None:
            yield result | {"skipped": "this JAX has no interpreter"}
            continue
        try:
            got = jax.jit(_first(function, named))(*args)
            error = max(_largest(a, b) for a, b in zip(got, expected, strict=True))
            yield result | {"error_max": error, "passed": bool(error <= _TOLERANCE[dtype])}
        except Exception as exception:  # The other implementation still has its turn.
            yield result | {"error": _said(exception)}


def _first(function, named: dict) -> Callable:
    """Arrays of the result alone, as a tuple."""

    def call(*args):
        result = function(*args, **named)
        return tuple(result[:2]) if isinstance(result, tuple) else (result,)

    return call


def _largest(got, expected) -> float:
    """NaN counts as infinitely wrong."""
    error = jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32)).max()
    return float(jnp.where(jnp.isfinite(error), error, jnp.inf))


def _said(exception: Exception) -> str:
    return f"{type(exception).__name__}: {str(exception).strip().splitlines()[0][:300]}"


def _normal(seed: int, *shape: int, dtype="bfloat16"):
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype))()


def pages_of(sizes: Sizes, lengths: tuple[int, ...], tokens: int, page: int, head_dim: int, dtype: str):
    """Arguments of paged attention: pages shuffled over the pool, filled with normal values."""
    counts = [-(-(length + tokens) // page) for length in lengths]
    shuffled = np.random.default_rng(page).permutation(sum(counts))
    table = np.zeros((len(lengths), max(counts)), np.int32)
    for row, count in enumerate(counts):
        first = sum(counts[:row])
        table[row, :count] = shuffled[first : first + count]
    held = "float32" if dtype == "float32" else "bfloat16"
    q = 2 * _normal(1, len(lengths), tokens, sizes.kv_heads * sizes.groups, head_dim, dtype=held)
    pools = [_normal(seed, sum(counts), sizes.kv_heads, page, head_dim, dtype=held) for seed in (2, 3)]
    scales = {}
    if dtype in _EIGHT_BITS:
        quantized = [jax.jit(partial(quantize, dtype=dtype))(x) for x in pools]
        pools = [x for x, _ in quantized]
        scales = {"k_scales": quantized[0][1], "v_scales": quantized[1][1]}
    return (q, *pools, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)), scales


def _paged(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    cases = [("verify", sizes.lengths, sizes.run, page, "bfloat16", sizes.head_dim) for page in sizes.pages]
    cases += [("verify", sizes.lengths, sizes.run, sizes.pages[-1], kind, sizes.head_dim) for kind in _EIGHT_BITS]
    cases.append(("verify", sizes.lengths, sizes.run, sizes.pages[0], "float32", min(sizes.head_dim, 128)))
    cases.append(("chunk", (sizes.lengths[0], 0), sizes.chunk, sizes.pages[-1], "bfloat16", sizes.head_dim))
    for case, lengths, tokens, page, dtype, head_dim in cases:
        args, scales = pages_of(sizes, lengths, tokens, page, head_dim, dtype)
        yield from _compare("paged_attention", f"{case}, pages of {page}", dtype, dry_run, args, **scales)


def ring_of(sizes: Sizes, tokens: int, slots: int, sink: int, window: int, lengths: tuple[int, ...], dtype: str):
    """Arguments of sink-window attention for the last ``tokens`` positions of each row."""
    newest = np.maximum(np.array(lengths)[:, None] - tokens + np.arange(tokens), 0).astype(np.int32)
    start = np.maximum(newest - window + 1, 0) if window else np.zeros_like(newest)
    head_dim = min(sizes.head_dim, 128) if dtype == "float32" else sizes.head_dim
    q = 2 * _normal(4, len(lengths), tokens, sizes.kv_heads * sizes.groups, head_dim, dtype=dtype)
    ring = [_normal(seed, len(lengths), sizes.kv_heads, slots, head_dim, dtype=dtype) for seed in (5, 6)]
    return (q, *ring, jnp.asarray(newest), jnp.asarray(start))


def _ring(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    slots = sizes.sink + sizes.window + sizes.run - 1
    lengths = (5 * slots, slots - 2, sizes.run)
    cases = [
        ("draft, odd slots", 1, slots, sizes.sink, sizes.window, lengths, "bfloat16"),
        ("draft, whole tiles", 1, -(-slots // 8) * 8, sizes.sink, sizes.window, lengths, "bfloat16"),
        ("draft-extend", sizes.run, slots, sizes.sink, sizes.window, lengths, "bfloat16"),
        ("draft-extend", sizes.run, slots, sizes.sink, sizes.window, lengths, "float32"),
        ("native", 1, sizes.native, 0, 0, (sizes.native, sizes.run), "bfloat16"),
    ]
    for case, tokens, slots, sink, window, rows, dtype in cases:
        args = ring_of(sizes, tokens, slots, sink, window, rows, dtype)
        yield from _compare("sink_window_attention", case, dtype, dry_run, args, sink=sink)


def delta_of(sizes: Sizes, rows: int, tokens: int):
    """Arguments of the gated delta rule."""
    run, dim = (rows, tokens, sizes.delta_heads), sizes.delta_dim
    q, k, v = (_normal(seed, *run, dim, dtype="float32") for seed in (7, 8, 9))
    k, q = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (k, q))
    log_decay, beta = (jax.random.uniform(jax.random.key(seed), run) for seed in (10, 11))
    return (q, k, v, -log_decay, beta, _normal(12, rows, sizes.delta_heads, dim, dim, dtype="float32"))


def _delta(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    for case, rows, tokens in (("verify", 2, sizes.run), ("chunk", 1, sizes.chunk)):
        yield from _compare("gated_delta_rule", case, "float32", dry_run, delta_of(sizes, rows, tokens))


def ssd_of(sizes: Sizes, rows: int, tokens: int):
    """Arguments of state-space duality."""
    run, read = (rows, tokens, sizes.ssd_heads), (rows, tokens, sizes.ssd_groups, sizes.ssd_size)
    x = _normal(13, *run, sizes.ssd_width, dtype="float32")
    b, c = (_normal(seed, *read, dtype="float32") for seed in (14, 15))
    b, c = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (b, c))
    log_decay = -jax.random.uniform(jax.random.key(16), run)
    return (x, b, c, log_decay, _normal(17, rows, sizes.ssd_heads, sizes.ssd_size, sizes.ssd_width, dtype="float32"))


def _ssd(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    for case, rows, tokens in (("one token", 1, 1), ("verify", 2, sizes.run), ("chunk", 1, sizes.chunk)):
        yield from _compare("mamba2_ssd", case, "float32", dry_run, ssd_of(sizes, rows, tokens))


def _seconds(function: Callable, *args) -> float:
    """Median of five rounds of calls in a row, each long enough for a clock."""
    calls = max(1, min(200, int(0.1 / seconds_of(function, *args, repeats=1))))

    def calls_in_a_row() -> Any:
        for _ in range(calls - 1):
            function(*args)
        return function(*args)

    return seconds_of(calls_in_a_row, repeats=5) / calls


def _bandwidth(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    x = _normal(0, sizes.copy_bytes // 2)
    seconds = _seconds(jax.jit(jnp.negative), x)
    yield {"name": "copy", "gb_per_s": 2 * x.nbytes / seconds / 1e9, "ms": 1e3 * seconds}
    a, b = (_normal(seed, sizes.matrix, sizes.matrix) for seed in (0, 1))
    seconds = _seconds(jax.jit(jnp.matmul), a, b)
    yield {"name": "matrix product", "tflop_per_s": 2 * sizes.matrix**3 / seconds / 1e12, "ms": 1e3 * seconds}


def _verify(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    """One row of a million tokens, N = 7: milliseconds, and bytes of keys and values a second."""
    cases = [(page, "bfloat16", implementation) for page in sizes.pages for implementation in IMPLEMENTATIONS]
    cases += [(sizes.pages[-1], kind, "mosaic_gpu") for kind in _EIGHT_BITS]
    for page, dtype, implementation in cases:
        args, scales = pages_of(sizes, (sizes.long - sizes.run,), sizes.run, page, sizes.head_dim, dtype)
        name = f"{implementation}, {dtype}, pages of {page}"
        for result in _timed("paged_attention", name, implementation, dry_run, args, scales):
            per_ms = sum(x.nbytes for x in args[1:3]) / 1e6
            yield result | ({"gb_per_s": per_ms / result["ms"]} if "ms" in result else {})


def _others(sizes: Sizes, dry_run: bool) -> Iterator[dict]:
    """Milliseconds of one layer's draft attention, native and windowed, and of its recurrence, one row."""
    slots = sizes.sink + sizes.window + sizes.run - 1
    last = (sizes.long,)
    for implementation in IMPLEMENTATIONS:
        for tokens in (1, sizes.run):
            args = ring_of(sizes, tokens, slots, sizes.sink, sizes.window, last, "bfloat16")
            name = f"ring, {tokens} queries, {implementation}"
            yield from _timed("sink_window_attention", name, implementation, dry_run, args, {"sink": sizes.sink})
        args = ring_of(sizes, 1, sizes.long, 0, 0, last, "bfloat16")
        yield from _timed(
            "sink_window_attention", f"native, {implementation}", implementation, dry_run, args, {"sink": 0}
        )
        for tokens in (sizes.run, sizes.chunk):
            name = f"delta rule, {tokens} tokens, {implementation}"
            yield from _timed("gated_delta_rule", name, implementation, dry_run, delta_of(sizes, 1, tokens), {})
            name = f"state-space duality, {tokens} tokens, {implementation}"
            yield from _timed("mamba2_ssd", name, implementation, dry_run, ssd_of(sizes, 1, tokens), {})


def _timed(op: str, name: str, implementation: str, dry_run: bool, args, named: dict) -> Iterator[dict]:
    function = operation(op, implementation, dry_run)
    if function is None:
        yield {"name": name, "skipped": "this JAX has no interpreter"}
        return
    try:
        # An interpreted kernel says nothing about time: it is only run.
        if dry_run and implementation == "mosaic_gpu":
            jax.block_until_ready(jax.jit(_first(function, named))(*args))
            yield {"name": name, "skipped": "interpreted"}
            return
        yield {"name": name, "ms": 1e3 * _seconds(jax.jit(_first(function, named)), *args)}
    except Exception as exception:  # The next one still has its turn.
        yield {"name": name, "error": _said(exception)}
