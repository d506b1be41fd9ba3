"""Lossless long-context speculative decoding in JAX for models with a Multi-Token-Prediction head."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wmtp_jax.engine.engine import Engine, Running
    from wmtp_jax.engine.options import EngineOptions
    from wmtp_jax.errors import UserError
    from wmtp_jax.generation.options import GenerateOptions
    from wmtp_jax.generation.rows import Event
    from wmtp_jax.generation.stats import Stats
    from wmtp_jax.generation.stream import Generation, Stream, generate, stream
    from wmtp_jax.model import Model, load, logits

_HOMES = {
    "Engine": "wmtp_jax.engine.engine",
    "EngineOptions": "wmtp_jax.engine.options",
    "Event": "wmtp_jax.generation.rows",
    "GenerateOptions": "wmtp_jax.generation.options",
    "Generation": "wmtp_jax.generation.stream",
    "Model": "wmtp_jax.model",
    "Running": "wmtp_jax.engine.engine",
    "Stats": "wmtp_jax.generation.stats",
    "Stream": "wmtp_jax.generation.stream",
    "UserError": "wmtp_jax.errors",
    "generate": "wmtp_jax.generation.stream",
    "load": "wmtp_jax.model",
    "logits": "wmtp_jax.model",
    "stream": "wmtp_jax.generation.stream",
}

__all__ = [
    "Engine",
    "EngineOptions",
    "Event",
    "GenerateOptions",
    "Generation",
    "Model",
    "Running",
    "Stats",
    "Stream",
    "UserError",
    "generate",
    "load",
    "logits",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Loads JAX with the first name that needs it: `wmtp --help` does without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
