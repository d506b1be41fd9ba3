"""Decoding speed beside Hugging Face transformers: one checkpoint, one prompt, one machine, one run.

All contenders get the same token ids, decode greedily in float32 with a cache on the same processors, and ignore
end-of-text tokens, so that all make the same number of tokens. ``race`` times a run of one new token and the whole
run; their difference is the decoding, for every contender alike, and it holds no prompt, no tokenizer, no compilation.
Transformers runs as it installs: its ``generate`` with the default attention, without ``torch.compile``, and with its
own torch code for the gated delta rule where no compiled kernels are installed (there are none for CPUs). It runs with
all the threads and with one, as a second thread does not always pay in a small model; the faster is the yardstick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wmtp_jax.bench.acceptance import first_difference
from wmtp_jax.bench.options import VersusOptions
from wmtp_jax.bench.timing import Contender, Timing, race
from wmtp_jax.errors import UserError
from wmtp_jax.generation.stream import generate
from wmtp_jax.model import Model


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a text leaves the one of transformers, and how far apart its two best logits lay there.

    A lead of the order of float32 rounding (1e-5 and less) is a tie that the order of summation decides.
    """

    token: int
    logit_lead: float


@dataclass(frozen=True, kw_only=True)
class Race:
    """The timings by contender, transformers first, and where texts differ from its first."""

    prompt_tokens: int
    new_tokens: int
    threads: int
    timings: dict[str, Timing]
    yardsticks: tuple[str, ...]
    divergences: dict[str, Divergence | None]

    @property
    def ratios(self) -> dict[str, float]:
        """Median decode tokens a second over those of the faster transformers."""
        base = max(self.timings[name].tokens_per_second.median for name in self.yardsticks)
        return {name: timing.tokens_per_second.median / base for name, timing in self.timings.items()}


def versus_hf(
    folder: Path, model: Model, prompt: list[int], options: VersusOptions, note: Callable[[str], None]
) -> Race:
    """Races transformers, plain decoding and MTP drafts; ``model`` is the float32 model of ``folder``.

    Raises UserError where transformers is missing or cannot load the folder.
    """
    hugging_face = load_hugging_face(folder)
    sink = options.sink if options.window else 0

    def theirs(threads: int) -> Contender:
        return lambda new_tokens: hugging_face_greedy(hugging_face, prompt, new_tokens, threads)

    def ours(gamma: int, window: int, sink: int) -> Contender:
        def run(new_tokens: int) -> list[int]:
            settings = dict(max_new_tokens=new_tokens, gamma=gamma, window=window, sink=sink, ignore_eos=True)
            return generate(model, [prompt], **settings).tokens[0]

        return run

    yardsticks = {name: theirs(threads) for name, threads in yardstick_threads(options.threads).items()}
    contenders = {
        **yardsticks,
        "wmtp gamma 0": ours(0, 0, 0),
        f"wmtp gamma {options.gamma}": ours(options.gamma, options.window, sink),
    }
    timings = race(contenders, options.new_tokens, options.repeats, note)
    reference = next(iter(timings.values())).tokens
    return Race(
        prompt_tokens=len(prompt),
        new_tokens=options.new_tokens,
        threads=options.threads,
        timings=timings,
        yardsticks=tuple(yardsticks),
        divergences={name: divergence(hugging_face, prompt, reference, t.tokens) for name, t in timings.items()},
    )


def yardstick_threads(threads: int) -> dict[str, int]:
    """The ways in which transformers runs, and their threads."""
    alone = {"transformers, 1 thread": 1}
    return alone if threads == 1 else {f"transformers, {threads} threads": threads, **alone}


def require_transformers() -> None:
    """Raises UserError where torch or transformers cannot be imported."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error}: this needs the extra `test` (pip install 'wmtp-jax[test]', Python 3.11)") from None


def load_hugging_face(folder: Path) -> Any:
    """Transformers' float32 model of a folder, which ignores end-of-text tokens. Raises UserError where it cannot."""
    require_transformers()
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: transformers cannot load it as a Hugging Face folder ({reason})") from None
    model.generation_config.eos_token_id = None
    return model.eval()


def hugging_face_greedy(model: Any, prompt: list[int], new_tokens: int, threads: int) -> list[int]:
    """The tokens of transformers' own ``generate``."""
    import torch

    torch.set_num_threads(threads)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def divergence(model: Any, prompt: list[int], reference: list[int], tokens: list[int]) -> Divergence | None:
    """Where ``tokens`` leave the transformers model's own ``reference``; None where they never do."""
    import torch

    token = first_difference(reference, tokens)
    if token is None:
        return None
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + reference[:token]])).logits[0, -1]
    best = logits.topk(2).values
    return Divergence(token=token, logit_lead=float(best[0] - best[1]))
