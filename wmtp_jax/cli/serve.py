"""`wmtp serve`: the OpenAI API over HTTP, and a page to try the model on."""

import os
from pathlib import Path
from typing import Annotated

import typer

from wmtp_jax.cli.output import note
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.errors import UserError
from wmtp_jax.folders import DEMO
from wmtp_jax.generation.options import DEFAULT_SINK
from wmtp_jax.serve.options import ServeOptions, is_api_key
from wmtp_jax.units import parse_bytes, parse_tokens

_Engine = EngineOptions
_Serve = ServeOptions
KEY_VARIABLE = "WMTP_API_KEY"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("serve")(serve_command)


def serve_command(
    model: Annotated[str, typer.Option(metavar="PATH", help="A model folder or hub id.")] = DEMO,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = _Serve.host,
    port: Annotated[int, typer.Option(help="0 is a free one.")] = _Serve.port,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model.", show_default="its folder's name")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with the key that requests must bring; ${KEY_VARIABLE} is read without one."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Requests that are decoded at the same time.")] = _Engine.rows,
    context: Annotated[
        str, typer.Option(metavar="TOKENS", help="Of the longest request: prompt, new tokens, drafts.")
    ] = str(_Engine.context),
    pages: Annotated[
        int | None, typer.Option(help="Of the cache, for all rows.", show_default="rows times context")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Positions a page.", show_default="what this machine reads fastest")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Prompt tokens a forward pass.")] = _Engine.chunk,
    prefill_tokens: Annotated[
        int, typer.Option(help="Prompt tokens that are read between two looks at who decodes.")
    ] = _Engine.prefill_tokens,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more get status 429.")] = _Engine.queue,
    gamma: Annotated[int, typer.Option(help="Drafted tokens a step; 0 is plain decoding.")] = _Engine.gamma,
    rest: Annotated[
        bool, typer.Option(help="Draft nothing for a number of rows at which drafts cost more than they bring.")
    ] = _Engine.rest,
    window: Annotated[int, typer.Option(help="Tokens the draft head sees; 0 is all.")] = _Engine.window,
    sink: Annotated[
        int | None, typer.Option(help="First tokens it sees besides.", show_default=f"{DEFAULT_SINK} with a window")
    ] = None,
    prefix_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Kept of prompts that were read, for those that begin alike.")
    ] = "256MB",
    body_limit: Annotated[str, typer.Option(metavar="BYTES", help="Of a request; more get status 413.")] = "8MB",
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests have when the server is told to stop.")
    ] = _Serve.grace,
    compare: Annotated[
        bool, typer.Option(help="Let the page draft without a window too, in an engine of one row.")
    ] = _Serve.compare,
    heads: Annotated[str | None, typer.Option(metavar="PATH", help="Heads that `wmtp train heads` made.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="Of keys and values: float32, bfloat16, float16, int8 or float8_e4m3fn.")
    ] = None,
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Load no draft head; decode plainly.")] = False,
) -> None:
    """Serve the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, and a page at /."""
    options = ServeOptions(
        host=host,
        port=port,
        name=(model if model == DEMO else Path(model).name) if name is None else name,
        api_key=_api_key(api_key_file),
        body_bytes=parse_bytes(body_limit, "body-limit"),
        grace=grace,
        compare=compare,
        engine=EngineOptions(
            rows=rows,
            context=parse_tokens(context, "context"),
            pages=pages,
            page_size=page_size,
            chunk=chunk,
            prefill_tokens=prefill_tokens,
            queue=queue,
            gamma=0 if no_mtp and heads is None else gamma,
            rest=rest,
            window=window,
            sink=sink,
            cache_dtype=cache_dtype,
            prefix_bytes=parse_bytes(prefix_memory, "prefix-memory"),
        ),
    )
    from wmtp_jax.compilation_cache import enable_compilation_cache
    from wmtp_jax.model import load
    from wmtp_jax.serve.server import serve

    enable_compilation_cache()
    loaded = load(model, dtype=dtype, no_mtp=no_mtp, heads=heads)
    note(f"{options.name}: loaded; compiling for up to {rows} rows")
    serve(loaded, options, lambda address: note(f"serving {options.name} at {address}"))


def _api_key(path: Path | None) -> str | None:
    """From a file or the environment: a command line is seen by everyone on the machine."""
    if path is None:
        key, source = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
    else:
        key, source = path.read_bytes().decode("utf-8", "replace").strip(), str(path)
    if key is not None and not is_api_key(key):
        raise UserError(f"{source}: a key is printable ASCII text of at least one character")
    return key
