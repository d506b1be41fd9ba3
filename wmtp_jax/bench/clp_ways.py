"""The ways to use heads that ``bench clp`` compares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wmtp_jax.bench.options import ClpOptions
from wmtp_jax.clp.config import HeadsConfig
from wmtp_jax.clp.store import attach, load_heads
from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import ACCEPTS
from wmtp_jax.model import Model

PLAIN = "plain"
PLAIN_AGAIN = "plain, again"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to decode: the backbone, perhaps with heads, and the options of ``generate``.

    ``verified``: whether the text is the backbone's own by construction.
    """

    name: str
    model: Model
    options: dict[str, Any]
    verified: bool


def ways(backbone: Model, heads: Sequence[Path], options: ClpOptions) -> list[Way]:
    """Plain decoding, twice, and for every file of heads each rule at each number of heads, and verification.

    The second plain row shows the noise of all others. Raises UserError where ``options.only`` leaves none.
    """
    found: list[Way] = []
    for path in heads:
        read, vocabulary = load_heads(path, backbone.decoder)
        decoder = attach(backbone.decoder, read, vocabulary)
        model = Model(
            decoder=decoder,
            config=backbone.config,
            tokenizer=backbone.tokenizer,
            chat_template=backbone.chat_template,
        )
        found += _ways_of(read.config, model, options)
    names = [way.name for way in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two files of heads give {twice!r}; give one of a kind and number")
    kept = [way for way in found if not options.only or any(part in way.name for part in options.only)]
    unused = [part for part in options.only if not any(part in name for name in names)]
    if unused:
        raise UserError(f"--only: no way has {unused[0]!r} in its name; the ways are {'; '.join(names)}")
    plain = [Way(name=name, model=backbone, options=dict(gamma=0), verified=True) for name in (PLAIN, PLAIN_AGAIN)]
    return plain + kept


def _ways_of(config: HeadsConfig, model: Model, options: ClpOptions) -> Iterator[Way]:
    kind = f"{config.kind}{' competing' if config.competing else ''}"
    window = dict(window=options.window, sink=options.sink)
    # Competing heads have no length predictor for what follows the backbone's token, and no rule but one in the paper.
    for accept in ACCEPTS[1:] if not config.competing else ("all",):
        for tau in options.taus if accept != "all" else (0.0,):
            rule = accept if accept == "all" else f"{accept} {tau:g}"
            for k in range(1, config.drafts + 1):
                given = dict(accept=accept, gamma=k, tau=tau)
                yield Way(name=f"{kind}: {rule}, k={k}", model=model, options=given | window, verified=False)
    if config.competing:
        return
    for gamma in (*range(1, config.drafts + 1), "auto"):
        yield Way(name=f"{kind}: verified, {gamma}", model=model, options=dict(gamma=gamma) | window, verified=True)
