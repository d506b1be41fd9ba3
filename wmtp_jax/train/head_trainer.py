"""Training of heads on a frozen backbone, then of the length predictor and the gate on text that neither has seen."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from wmtp_jax.clp.config import HeadsConfig
from wmtp_jax.clp.heads import Gate, Heads, features
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.draft_vocabulary import DraftVocabulary
from wmtp_jax.models.layers import Linear
from wmtp_jax.models.parameters import named_parameters, with_parameters
from wmtp_jax.option_checks import require
from wmtp_jax.train.checkpoints import restore_state, save_state
from wmtp_jax.train.head_data import Collected, split
from wmtp_jax.train.head_outputs import judge, spans
from wmtp_jax.train.loss import MTP_STEP_DECAY
from wmtp_jax.train.optimizer import make_optimizer, schedule

# Called with one dictionary of figures a step.
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """How long and how fast; ``epochs`` over the heads' share of the sequences, ``rows`` of them a step."""

    epochs: float = 4.0
    rows: int = 8
    learning_rate: float = 8e-3
    weight_decay: float = 0.01
    warmup: int = 100
    save_every: int = 200
    seed: int = 0
    # The paper's, for its one linear layer.
    predictor_epochs: int = 20
    predictor_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        require("rows", self.rows, 1)
        require("seed", self.seed, 0, 2**32 - 1)
        for name in ("epochs", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be a number above 0")


def initial_heads(config: HeadsConfig, model: Decoder, seed: int) -> Heads:
    """Float32 heads; an MTP layer starts as a copy of the backbone's last layer where the shapes agree."""
    heads = Heads(config, model.config, rngs=nnx.Rngs(seed))
    if heads.mtp is None:
        return heads
    own = named_parameters(heads.mtp)
    own["norm.weight"] = jnp.array(model.final_norm.weight[...], jnp.float32)
    last = _last_layer(model, len(list(heads.mtp.blocks)))
    for index, block in enumerate(last):
        for name, value in named_parameters(block).items():
            target = f"blocks.{index}.{name}"
            if target in own and own[target].shape == value.shape:
                # A copy: the trainer gives its arrays away, and these are the backbone's.
                own[target] = jnp.array(value, jnp.float32)
    heads.writers = with_parameters(heads.mtp, own)
    return heads


def _last_layer(model: Decoder, blocks: int) -> list[Any]:
    """The decoder's last blocks, one period's arrays each."""
    if model.unrolled:
        return list(list(model.blocks)[-1])[-blocks:]
    return [jax.tree.map(lambda x: x[-1], block) for block in list(model.blocks)[-blocks:]]


def train_heads(
    model: Decoder,
    heads: Heads,
    vocabulary: DraftVocabulary,
    collected: Collected,
    training: HeadTraining,
    folder: Path,
    report: Report,
) -> Heads:
    """Trains the heads, resuming from ``folder``, then the predictor and the gate. The backbone is not touched."""
    for_heads, for_predictor, held_out = split(collected, training.seed)
    if heads.config.kind != "own":
        heads = _fit_heads(model, heads, vocabulary, collected, for_heads, held_out, training, folder, report)
    return _fit_lengths(model, heads, vocabulary, collected, for_predictor, held_out, training, report)


def _trained(name: str) -> bool:
    return name.startswith("writers.")


def _fit_heads(model, heads, vocabulary, collected, rows, held_out, training, folder, report) -> Heads:
    steps = max(1, int(training.epochs * len(rows) / training.rows))
    rate = schedule(training.learning_rate, training.warmup, max(training.warmup, steps // 2), steps)
    optimizer = make_optimizer(rate, training.weight_decay)
    whole = named_parameters(heads)

    def initial() -> dict[str, Any]:
        own = {name: value for name, value in whole.items() if _trained(name)}
        return {"parameters": own, "optimizer": optimizer.init(own), "step": jnp.zeros((), jnp.int32)}

    state = restore_state(jax.eval_shape(initial), folder) or initial()
    step_function = _make_step(heads, optimizer)
    for step in range(int(state["step"]), steps):
        started = time.perf_counter()
        batch = collected.batch(_batch(rows, training, step))
        state, losses, accuracy = step_function(model, vocabulary, state, *batch)
        last = step + 1 == steps
        row = {"step": step + 1, "steps": steps, "loss": losses.tolist(), "accuracy": accuracy.tolist()}
        if not all(map(math.isfinite, row["loss"])):
            raise UserError(f"training diverged at step {step + 1}: give a lower --learning-rate and another --out")
        report({**row, "seconds": time.perf_counter() - started})
        if (step + 1) % training.save_every == 0 or last:
            save_state(state, folder)
            current = with_parameters(heads, whole | state["parameters"])
            found = accuracies(model, current, vocabulary, collected, held_out, training.rows)
            report({"step": step + 1, "steps": steps, "held_out_accuracy": found})
    return with_parameters(heads, whole | state["parameters"])


def _batch(rows: np.ndarray, training: HeadTraining, step: int) -> np.ndarray:
    """Every sequence once an epoch, in an order of (seed, epoch) alone: a resumed run sees what it would have."""
    positions = np.arange(step * training.rows, (step + 1) * training.rows)
    epochs = positions // len(rows)
    orders = {e: np.random.default_rng((training.seed, int(e))).permutation(len(rows)) for e in np.unique(epochs)}
    return np.array([rows[orders[e][position % len(rows)]] for e, position in zip(epochs, positions, strict=True)])


def _make_step(heads: Heads, optimizer: optax.GradientTransformation):
    template = named_parameters(heads)

    def loss(own, model, vocabulary, hidden, tokens, counted):
        judged = judge(model, with_parameters(heads, template | own), vocabulary, hidden, tokens, counted)
        total = jnp.maximum(judged.counted.sum(axis=(1, 2)), 1)
        losses = judged.loss.sum(axis=(1, 2)) / total
        weights = MTP_STEP_DECAY ** jnp.arange(len(losses))
        return jnp.sum(weights * losses) / jnp.sum(weights), (losses, judged.right.sum(axis=(1, 2)) / total)

    def step(model, vocabulary, state, *batch):
        # The backbone gives its values and gets no gradient: what is differentiated are the heads alone.
        model = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, _frozen(model))
        vocabulary = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, vocabulary)
        hidden, tokens, counted = batch
        arguments = (state["parameters"], model, vocabulary, hidden.astype(jnp.float32), tokens, counted)
        gradients, (losses, accuracy) = jax.grad(loss, has_aux=True)(*arguments)
        updates, opt_state = optimizer.update(gradients, state["optimizer"], state["parameters"])
        parameters = optax.apply_updates(state["parameters"], updates)
        return {"parameters": parameters, "optimizer": opt_state, "step": state["step"] + 1}, losses, accuracy

    return jax.jit(step, donate_argnums=2)


def _frozen(model: Decoder) -> Decoder:
    """What heads read of the backbone: its embedding. Its layers are left out, or the step would convert them all."""
    frozen = jax.tree.map(lambda x: x, model)
    frozen.blocks = nnx.List([])
    return frozen


@partial(jax.jit, static_argnames="want_features")
def _judge(model, heads, vocabulary, hidden, tokens, counted, want_features=False):
    dtype = model.embedding.dtype
    judged = judge(model, heads, vocabulary, hidden.astype(dtype), tokens, counted)
    own = jnp.stack([features(logits) for logits in judged.logits]) if want_features else None
    return judged._replace(logits=[]), own


def accuracies(model, heads, vocabulary, collected: Collected, rows: np.ndarray, size: int) -> list[float]:
    """Held-out share of right tokens by head."""
    right, counted = 0, 0
    for begin in range(0, len(rows), size):
        judged, _ = _judge(model, heads, vocabulary, *collected.batch(rows[begin : begin + size]))
        right, counted = right + judged.right.sum(axis=(1, 2)), counted + judged.counted.sum(axis=(1, 2))
    return (right / jnp.maximum(counted, 1)).tolist()


def _fit_lengths(model, heads, vocabulary, collected, rows, held_out, training: HeadTraining, report: Report) -> Heads:
    seen = _examples(model, heads, vocabulary, collected, rows, training.rows)
    unseen = _examples(model, heads, vocabulary, collected, held_out, training.rows)
    predictor = _fit(_predictor_loss, heads.predictor, seen, training)
    gate = _fit(_gate_loss, heads.gate, seen, training)
    fitted = jax.tree.map(lambda x: x, heads)
    fitted.predictor, fitted.gate = predictor, gate
    report(
        {
            "mean_span": float(unseen["span"].mean()),
            "predictor_accuracy": float((predictor(unseen["hidden"]).argmax(-1) == unseen["span"]).mean()),
            "gate_accuracy": float(((gate(unseen["features"]) > 0) == unseen["right"]).mean()),
            "span_shares": np.bincount(unseen["span"], minlength=heads.config.k + 1) / len(unseen["span"]),
            "examples": len(seen["span"]),
        }
    )
    return fitted


def _examples(model, heads, vocabulary, collected: Collected, rows: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Hidden states, labels, features and right heads of every position at which all heads count."""
    parts: list[dict[str, np.ndarray]] = []
    for begin in range(0, len(rows), size):
        hidden, tokens, counted = collected.batch(rows[begin : begin + size])
        judged, own = _judge(model, heads, vocabulary, hidden, tokens, counted, want_features=True)
        span, there = (np.asarray(x) for x in spans(judged))
        parts.append(
            {
                "hidden": np.asarray(hidden.astype(jnp.float32))[there],
                "span": span[there],
                "features": np.moveaxis(np.asarray(own), 0, 2)[there],
                "right": np.moveaxis(np.asarray(judged.right), 0, 2)[there],
            }
        )
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not len(found["span"]):
        raise UserError("no sequence kept for the length predictor has an answer as long as the heads: give more text")
    return found


def _predictor_loss(predictor: Linear, batch: dict[str, Any]) -> jax.Array:
    logits = predictor(batch["hidden"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["span"]).mean()


def _gate_loss(gate: Gate, batch: dict[str, Any]) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(gate(batch["features"]), batch["right"]).mean()


def _fit(loss: Callable, module: Any, examples: dict[str, np.ndarray], training: HeadTraining, size: int = 256) -> Any:
    """AdamW with a cosine schedule, the paper's for its layer."""
    count = len(examples["span"])
    size = min(size, count)
    steps = training.predictor_epochs * (count // size)
    optimizer = optax.adamw(optax.cosine_decay_schedule(training.predictor_learning_rate, max(steps, 1)))
    parameters = named_parameters(module)
    opt_state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, opt_state, batch):
        gradients = jax.grad(lambda p: loss(with_parameters(module, p), batch))(parameters)
        updates, opt_state = optimizer.update(gradients, opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state

    for epoch in range(training.predictor_epochs):
        order = np.random.default_rng((training.seed, epoch)).permutation(count)
        for begin in range(0, count - size + 1, size):
            rows = order[begin : begin + size]
            batch = {name: value[rows] for name, value in examples.items()}
            parameters, opt_state = step(parameters, opt_state, batch)
    return with_parameters(module, parameters)
