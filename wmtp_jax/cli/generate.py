"""`wmtp generate`: text from a prompt as it comes, and what it cost."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wmtp_jax.cli.output import note, print_json
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.errors import UserError
from wmtp_jax.folders import DEMO
from wmtp_jax.generation.options import AUTO, DEFAULT_SINK
from wmtp_jax.generation.options import GenerateOptions as Defaults

if TYPE_CHECKING:
    from wmtp_jax.generation.stats import Stats
    from wmtp_jax.model import Model


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("generate")(generate_command)


def generate_command(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to continue.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read it from a UTF-8 file; - is standard input.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask it as a user's turn, by the chat template.")] = False,
    model: Annotated[str, typer.Option(metavar="PATH", help="A model folder or hub id.")] = DEMO,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many.")] = Defaults.max_new_tokens,
    gamma: Annotated[
        str, typer.Option(metavar="<int>|auto", help="Drafted tokens a step; 0 is plain decoding, auto what pays.")
    ] = str(Defaults.gamma),
    heads: Annotated[str | None, typer.Option(metavar="PATH", help="Heads that `wmtp train heads` made.")] = None,
    accept: Annotated[
        str,
        typer.Option(help="verify; or clp, gate, threshold, all, which emit unverified heads and CHANGE THE TEXT."),
    ] = Defaults.accept,
    tau: Annotated[float, typer.Option(help="How sure clp, gate or threshold must be.")] = Defaults.tau,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens the draft head sees; 0 is all.", show_default=str(Defaults.window)),
    ] = None,
    sink: Annotated[
        int | None, typer.Option(help="First tokens it sees besides.", show_default=f"{DEFAULT_SINK} with a window")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = Defaults.temperature,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = Defaults.top_k,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = Defaults.top_p,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = Defaults.min_p,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = Defaults.repetition_penalty,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = Defaults.presence_penalty,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = Defaults.frequency_penalty,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = SamplingParams.seed,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    chunk: Annotated[int, typer.Option(help="Prompt tokens a forward pass.")] = Defaults.chunk,
    kernels: Annotated[
        str | None, typer.Option(help="reference, xla, mosaic_gpu or mosaic_tpu.", show_default="chosen")
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="Of keys and values: float32, bfloat16, float16, int8 or float8_e4m3fn.")
    ] = Defaults.cache_dtype,
    page_size: Annotated[
        int | None, typer.Option(help="Positions a cache page; by default what this machine reads fastest.")
    ] = Defaults.page_size,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Load no draft head; decode plainly.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run plain, native and windowed; print a table.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt, drafting with the model's own MTP head; verified, the text is the same as without drafts."""
    options: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens,
        gamma=0 if no_mtp and heads is None else _gamma(gamma),
        accept=accept,
        tau=tau,
        sink=sink,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        chunk=chunk,
        page_size=page_size,
        cache_dtype=cache_dtype,
    )
    if window is not None:
        options["window"] = window
    Defaults(**options)
    if accept != Defaults.accept:
        note(f"accept={accept}: tokens are not verified, so this is not the text that the model would write")
    text = _prompt_text(prompt, prompt_file)
    loaded = _load(model, dtype, no_mtp, kernels, heads)
    ids = loaded.encode_chat([{"role": "user", "content": text}]) if chat else loaded.encode(text)
    if compare:
        from wmtp_jax.cli.comparison import compare_command

        compare_command(loaded, ids, options, json=json)
    else:
        _generate(loaded, ids, options, json=json)


def _gamma(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise UserError(f"gamma={text}: must be a whole number, or {AUTO}") from None


def _prompt_text(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UserError("give a prompt or --prompt-file, not both")
    if prompt is not None:
        return _not_empty(prompt, "the prompt")
    if prompt_file is None:
        raise UserError("give a prompt, or --prompt-file")
    source = "standard input" if prompt_file == "-" else prompt_file
    data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
    try:
        return _not_empty(data.decode("utf-8"), source)
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x})") from None


def _not_empty(text: str, source: str) -> str:
    if not text:
        raise UserError(f"{source} is empty: give at least one character to continue")
    return text


def _load(path: str, dtype: str | None, no_mtp: bool, kernels: str | None, heads: str | None) -> "Model":
    from wmtp_jax.compilation_cache import enable_compilation_cache
    from wmtp_jax.model import load

    enable_compilation_cache()
    return load(path, dtype=dtype, no_mtp=no_mtp, kernels=kernels, heads=heads)


def _generate(model: "Model", ids: list[int], options: dict[str, Any], *, json: bool) -> None:
    from wmtp_jax.cli.terminal import prompt_progress, safe_for_terminal
    from wmtp_jax.generation.stream import stream

    with prompt_progress() as on_progress:
        running = stream(model, ids, **options, on_progress=on_progress)
        first = next(running)
    terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        sys.stdout.write(safe_for_terminal(text) if terminal else text)
        sys.stdout.flush()

    if not json:
        show(first.text)
    for event in running:
        if not json:
            show(event.text)
    out = running.generation()
    if json:
        print_json(dict(text=out.text[0], tokens=out.tokens[0], finished=out.finished[0], stats=out.stats))
        return
    if not out.text[0].endswith("\n"):
        show("\n")
    note(closing_line(out.stats))


def closing_line(stats: "Stats") -> str:
    """Tokens, and what they cost where there was a step to measure."""
    line = f"{stats.new_tokens} token{'' if stats.new_tokens == 1 else 's'}"
    if not stats.verify_steps:
        return line
    return (
        f"{line}, {stats.tokens_per_second:.1f} tokens/s, acceptance length {stats.acceptance_length:.2f}, "
        f"step {stats.step_ms:.1f} ms"
    )
