"""The draft head drafts what an independent torch head made of Hugging Face's layers drafts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints_convert import load_hf
from tests.hf_models import VOCAB, randomize, save_checkpoint, tiny_model, torch
from tests.models.mtp_oracle import QwenMTP, torch_mtp
from wmtp_jax.decode.drafter import MTPDrafter, draft_run
from wmtp_jax.decode.loop import step
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import SamplingParams, batch_sampling

GAMMA = 4
TOLERANCE = 1e-4
COMMITTED = 23
# Window and sink. The last two hold the whole context, so they draft as the full head does.
WINDOWS = {
    "full": (0, 0),
    "window": (6, 0),
    "sink and window": (5, 3),
    "window of one": (1, 2),
    "window and sink reach all": (COMMITTED - 2, 2),
    "window reaches all": (COMMITTED + 9, 1),
}


@pytest.fixture(scope="module", params=["Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "NemotronH"])
def heads(request, tmp_path_factory):
    """The target in torch, its head, and our decoder with both."""
    short = dict(full_attention_interval=2, num_hidden_layers=2)
    target = tiny_model(
        request.param, **(dict(hybrid_override_pattern="M*E") if "Nemotron" in request.param else short)
    )
    head = randomize(torch_mtp(target), 1)
    folder = save_checkpoint(
        target, tmp_path_factory.mktemp("checkpoint"), mtp=head, packed=request.param == "Qwen3_5Moe"
    )
    return target, head, load_hf(folder, dtype=jnp.float32)[1]


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(0, VOCAB, COMMITTED + 1)


@pytest.mark.parametrize("view", WINDOWS)
def test_drafts_equal_those_of_the_torch_head(heads, tokens, view):
    target, head, decoder = heads
    window, sink = WINDOWS[view]
    theirs = head.draft(torch.tensor(tokens), _hf_hidden(target, tokens), GAMMA, window=window, sink=sink)
    best = theirs.logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 2 * TOLERANCE, "the oracle's drafts hang on rounding: choose other tokens"
    ours, logits = _drafts(decoder, tokens, GAMMA, window, sink)
    np.testing.assert_array_equal(ours, theirs.tokens.numpy())
    np.testing.assert_allclose(logits, theirs.logits.numpy(), rtol=0, atol=TOLERANCE)


def test_the_torch_head_sees_a_short_window_and_only_that(heads, tokens):
    target, head, _ = heads
    hidden = _hf_hidden(target, tokens)
    views = {
        name: head.draft(torch.tensor(tokens), hidden, GAMMA, window=w, sink=s) for name, (w, s) in WINDOWS.items()
    }
    full = views["full"].logits
    assert torch.equal(views["window and sink reach all"].logits, full)
    assert torch.equal(views["window reaches all"].logits, full)
    for short in ("window", "sink and window", "window of one"):
        assert (views[short].logits - full).abs().amax(dim=-1).min() > 10 * TOLERANCE


def test_the_torch_head_is_the_layer_that_hugging_face_defines(heads, tokens):
    target, head, _ = heads
    if not isinstance(head, QwenMTP):
        pytest.skip("Hugging Face has a layer for the Qwen arrangement alone")
    layers = pytest.importorskip("transformers.modeling_layers")
    layer = layers.MtpLayer(target.config, lambda *_: head.layers[0], type(head.norm), 0)
    layer.enorm, layer.hnorm, layer.eh_proj = head.pre_fc_norm_embedding, head.pre_fc_norm_hidden, head.fc
    layer.post_norm = head.norm
    following = torch.tensor(tokens[1:])[None]
    positions = torch.arange(COMMITTED)[None]
    mask = torch.full((COMMITTED, COMMITTED), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        embedding, rotary = target.model.embed_tokens(following), target.model.rotary_emb(torch.zeros(1), positions)
        output = layer(embedding, _hf_hidden(target, tokens)[None], rotary, mask, positions, None)
        logits = target.lm_head(output)[0, -1]
    theirs = head.draft(torch.tensor(tokens), _hf_hidden(target, tokens), 1).logits[0]
    torch.testing.assert_close(theirs, logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", ["Qwen3_5", "NemotronH"], indirect=True)
@pytest.mark.parametrize("view", ["full", "sink and window"])
def test_the_drafter_drafts_as_the_torch_head_at_every_step(heads, tokens, view):
    target, head, decoder = heads
    window, sink = WINDOWS[view]
    drafter = MTPDrafter(gamma=GAMMA, window=window, sink=sink)
    prompt, sampling, stops = tokens[:-1].tolist(), batch_sampling([SamplingParams()]), jnp.full((1, 1), -1)
    state = start_state(decoder, drafter, [prompt], [99], page_size=16, dtype=jnp.float32, penalized=False)
    state = prefill(decoder, drafter, state, [prompt], sampling, stops, chunk=8)
    text = [*prompt, int(state.pending[0])]
    # Enough steps for the ring to wrap round.
    while len(text) < COMMITTED + 2 * (window + GAMMA + 1):
        drafts, logits, state, emitted = _observed_step(decoder, state, drafter, sampling, stops)
        known = np.array(text)
        theirs = head.draft(torch.tensor(known), _hf_hidden(target, known), GAMMA, window=window, sink=sink)
        np.testing.assert_allclose(logits[0], theirs.logits.numpy(), rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(drafts[0], theirs.tokens.numpy())
        text += np.asarray(emitted)[0][: int(state.length[0]) + 1 - len(text)].tolist()


@partial(jax.jit, static_argnames="drafter")
def _observed_step(decoder, state, drafter, sampling, stops):
    """One step of the loop: drafts, the logits behind them, the new state and the target's choices."""
    drafts, logits, _ = draft_run(decoder, state, drafter.gamma, sampling)
    state, choices, *_ = step(decoder, drafter, state, sampling, stops)
    return drafts, logits, state, choices


@torch.no_grad()
def _hf_hidden(target, tokens: np.ndarray) -> torch.Tensor:
    """The target's hidden states [L, M] after its final norm, of all tokens but the pending one."""
    return target.model(torch.tensor(tokens[None, :-1])).last_hidden_state[0]


def _drafts(decoder, tokens: np.ndarray, gamma: int, window: int, sink: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafted tokens [gamma] and logits [gamma, V], with every entry's keys and values made anew for each."""
    committed = len(tokens) - 1
    hidden = np.pad(_hidden(decoder, tokens[None, :-1]), ((0, 0), (0, gamma), (0, 0)))
    following = np.pad(tokens[1:], (0, gamma))
    drafted, logits = [], []
    for last in range(committed - 1, committed - 1 + gamma):
        visible = _visible(last, committed + gamma, committed, window or committed, sink)
        output, scores = _step(decoder, hidden, following[None], last, visible)
        logits.append(np.asarray(scores))
        drafted.append(np.argmax(logits[-1]))
        hidden[0, last + 1], following[last + 1] = output, drafted[-1]
    return np.stack(drafted), np.stack(logits)


@nnx.jit
def _hidden(decoder, tokens):
    return decoder.sequence(tokens)


@nnx.jit
def _step(decoder, hidden, following, last, visible):
    """The normed output [M] and logits [V] of entry ``last``."""
    head = decoder.mtp
    positions = jnp.arange(hidden.shape[1])[None]
    entries = head.entries(hidden, decoder.embed(following))
    keys, values = head.keys_values(entries, positions)
    one = (entries[:, last, None], positions[:, last, None])
    mask = visible[None, None, None]
    output = head.outputs(*one, lambda q: jax.nn.dot_product_attention(q, keys, values, mask=mask))
    return output[0, 0], decoder.logits(output)[0, 0]


def _visible(query: int, size: int, committed: int, window: int, sink: int) -> np.ndarray:
    """Keys that a query of the last committed entry or of a drafted one sees."""
    keys = np.arange(size)
    return (keys <= query) & ((keys < sink) | (keys >= committed - window))
