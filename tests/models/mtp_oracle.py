"""The draft head written a second time, in torch from Hugging Face's own layers, by brute force."""

import copy
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Drafts(NamedTuple):
    """``tokens`` [gamma], the ``logits`` [gamma, V] they are the argmax of."""

    tokens: Tensor
    logits: Tensor


class TorchMTP(nn.Module):
    """A draft head by brute force. Embedding and output head are the target's own and no part of this module's state.

    Subclasses name their submodules as checkpoints do under ``mtp.``.
    """

    def __init__(self, target: Any):
        super().__init__()
        self._target = (target,)  # A tuple hides the target from this module's parameters.

    @torch.no_grad()
    def draft(self, tokens: Tensor, hidden: Tensor, gamma: int, *, window: int = 0, sink: int = 0) -> Drafts:
        """Drafts what follows ``tokens`` [L + 1]: L committed ones, whose ``hidden`` [L, M] are known, and the pending.

        ``hidden`` is the target's, after its final norm. ``window=0`` is full attention. All entries are run again for
        every drafted token, and each query's keys are picked by an explicit mask.
        """
        target, committed = self._target[0], len(tokens) - 1
        entries = self.entries(hidden, self._embed(tokens[1:]))
        drafted, logits = [], []
        for step in range(gamma):
            visible = _visible(committed, step, window or committed, sink)
            mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
            output = self.outputs(entries, mask)[-1:]
            logits.append(target.lm_head(output)[0])
            drafted.append(logits[-1].argmax())
            entries = torch.cat([entries, self.entries(output, self._embed(drafted[-1][None]))])
        return Drafts(torch.stack(drafted), torch.stack(logits))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._target[0].get_input_embeddings()(tokens)

    def entries(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Entries [L, M] from hidden states and the embeddings of the tokens that follow them."""
        raise NotImplementedError

    def outputs(self, entries: Tensor, mask: Tensor) -> Tensor:
        """Normed outputs [L, M] of all entries; ``mask`` [1, 1, L, L] is added to the attention scores."""
        raise NotImplementedError


class QwenMTP(TorchMTP):
    """One full-attention decoder layer of the target's family between the draft head's norms and projection."""

    def __init__(self, target: Any):
        super().__init__(target)
        config = copy.deepcopy(target.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        family = type(target).__name__.removesuffix("ForCausalLM")
        source = vars(sys.modules[type(target).__module__])
        layer, norm = source[f"{family}DecoderLayer"], source[f"{family}RMSNorm"]
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.norm = norm(size, eps=eps)

    def entries(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1))

    def outputs(self, entries: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(len(entries))[None]
        rotary = self._target[0].model.rotary_emb(entries[None], positions)
        return self.norm(self.layers[0](entries[None], position_embeddings=rotary, attention_mask=mask))[0]


class NemotronMTP(TorchMTP):
    """An attention block and an expert block, without positions; the norms around them belong to the two."""

    def __init__(self, target: Any):
        super().__init__(target)
        config = copy.deepcopy(target.config)
        config.layers_block_type = ["full_attention", "moe"]
        source = vars(sys.modules[type(target).__module__])
        size, eps = config.hidden_size, config.layer_norm_epsilon
        first, last = (source["NemotronHBlock"](config, index) for index in range(2))
        first.enorm, first.hnorm, last.final_layernorm = (source["NemotronHRMSNorm"](size, eps=eps) for _ in range(3))
        first.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([first, last])

    def entries(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        first = self.layers[0]
        return first.eh_proj(torch.cat([first.enorm(embedding), first.hnorm(hidden)], dim=-1))

    def outputs(self, entries: Tensor, mask: Tensor) -> Tensor:
        first, last = self.layers
        return last.final_layernorm(last(first(entries[None], attention_mask=mask)))[0]


def torch_mtp(target: Any) -> TorchMTP:
    """The head that belongs to a target's family."""
    return (NemotronMTP if type(target).__name__.startswith("Nemotron") else QwenMTP)(target)


def _visible(committed: int, drafted: int, window: int, sink: int) -> Tensor:
    """Which keys [q, k] each entry sees: the window slides with a committed query and stands still for drafted ones."""
    rows = [
        [key <= query and (key < sink or key > query - window) for key in range(committed + drafted)]
        for query in range(committed)
    ]
    for query in range(committed, committed + drafted):
        kept = [key < sink or key >= committed - window for key in range(committed)]
        rows.append(kept + [key <= query for key in range(committed, committed + drafted)])
    return torch.tensor(rows)
