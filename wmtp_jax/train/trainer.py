"""A small resumable trainer: batches are a pure function of (seed, step), so a resumed run sees what it would have."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wmtp_jax.config import ModelConfig
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder, abstract, build
from wmtp_jax.models.parameters import named_parameters, with_parameters
from wmtp_jax.train.checkpoints import restore_state, save_state
from wmtp_jax.train.loss import Losses, losses, total
from wmtp_jax.train.optimizer import make_optimizer, schedule


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training with one batch shape. ``until`` is the step at which the next stage takes over."""

    until: int
    rows: int
    length: int
    mtp_steps: int


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run besides the model and the data."""

    stages: tuple[Stage, ...]
    seed: int = 0
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 50
    decay_from: int = 0
    mtp_weight: float = 0.3
    eval_every: int = 100
    eval_tokens: int = 32768
    save_every: int = 100

    @property
    def steps(self) -> int:
        return self.stages[-1].until

    def stage(self, step: int) -> Stage:
        """The stage that covers a step."""
        return next(stage for stage in self.stages if step < stage.until)


def train(
    config: ModelConfig,
    train_config: TrainConfig,
    train_tokens: np.ndarray,
    held_out_tokens: np.ndarray,
    bytes_per_token: float,
    folder: Path,
    report: Callable[[dict[str, Any]], None],
) -> Decoder:
    """Trains from the newest checkpoint under ``folder`` (or from scratch) to the last step.

    ``report`` gets one dictionary a step; held-out rows are also appended to ``folder/log.jsonl``.
    """
    longest = max(stage.length for stage in train_config.stages)
    if len(train_tokens) <= longest or len(held_out_tokens) <= longest:
        raise UserError(f"training data: needs more than {longest} tokens in each part, the longest stage's length")
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(
        schedule(train_config.learning_rate, train_config.warmup, train_config.decay_from, train_config.steps),
        train_config.weight_decay,
    )
    shapes = jax.eval_shape(lambda: _initial(config, optimizer, 0))
    state = restore_state(shapes, folder) or _initial(config, optimizer, train_config.seed)
    template = abstract(config)
    step_function = _make_step(template, optimizer, train_config.mtp_weight)
    for step in range(int(state["step"]), train_config.steps):
        stage = train_config.stage(step)
        started = time.perf_counter()
        batch = sample_batch(train_tokens, train_config.seed, step, stage.rows, stage.length)
        state, value = step_function(state, batch, stage)
        row = {"step": step + 1, **_row(value), "seconds": time.perf_counter() - started, "length": stage.length}
        if not math.isfinite(row["loss"]):
            raise UserError(f"training diverged at step {step + 1}: resume with a lower learning rate")
        report(row)
        last = step + 1 == train_config.steps
        if (step + 1) % train_config.eval_every == 0 or last:
            held_out = evaluate(template, state["parameters"], held_out_tokens, stage, train_config.eval_tokens)
            row = {"step": step + 1, **{f"held_out_{name}": value for name, value in _row(held_out).items()}}
            row["held_out_bits_per_byte"] = row["held_out_loss"] / math.log(2) / bytes_per_token
            report(row)
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        if (step + 1) % train_config.save_every == 0 or last:
            save_state(state, folder)
    return with_parameters(template, state["parameters"])


def sample_batch(tokens: np.ndarray, seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Random windows [rows, length], int32, decided by (seed, step) alone."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - length, rows)
    return np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)


def evaluate(template: Decoder, parameters: dict, tokens: np.ndarray, stage: Stage, count: int) -> Losses:
    """Mean losses over evenly spaced held-out windows, ``count`` tokens in all."""
    batches = max(1, count // (stage.rows * stage.length))
    starts = np.linspace(0, len(tokens) - stage.length - 1, batches * stage.rows).astype(int)
    windows = np.stack([tokens[start : start + stage.length] for start in starts]).astype(np.int32)
    parts = [
        _evaluate_batch(template, parameters, batch, max(stage.mtp_steps, 3))
        for batch in windows.reshape(batches, stage.rows, stage.length)
    ]
    return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values), axis=0), *parts)


_evaluate_batch = jax.jit(
    lambda template, parameters, batch, steps: losses(with_parameters(template, parameters), batch, steps),
    static_argnums=(3,),
)


def _make_step(template: Decoder, optimizer: optax.GradientTransformation, mtp_weight: float):
    def loss(parameters, batch, stage: Stage):
        model = with_parameters(template, parameters)
        value = losses(model, batch, stage.mtp_steps)
        return total(value, mtp_weight), value

    def step(state, batch, stage):
        (_, value), gradients = jax.value_and_grad(loss, has_aux=True)(state["parameters"], batch, stage)
        updates, opt_state = optimizer.update(gradients, state["optimizer"], state["parameters"])
        parameters = optax.apply_updates(state["parameters"], updates)
        return {"parameters": parameters, "optimizer": opt_state, "step": state["step"] + 1}, value

    return jax.jit(step, static_argnums=(2,), donate_argnums=(0,))


def _initial(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> dict[str, Any]:
    parameters = named_parameters(build(config, seed))
    return {"parameters": parameters, "optimizer": optimizer.init(parameters), "step": jnp.zeros((), jnp.int32)}


def _row(value: Losses) -> dict[str, Any]:
    return {
        "loss": float(value.target),
        "accuracy": float(value.target_accuracy),
        "draft_loss": [round(float(x), 4) for x in value.draft],
        "draft_accuracy": [round(float(x), 4) for x in value.draft_accuracy],
    }
