"""`wmtp bench`: what the method gains, measured here and now."""

from pathlib import Path
from typing import Annotated, Any

import typer

from wmtp_jax.bench import options as settings
from wmtp_jax.cli.bench_clp import register_clp
from wmtp_jax.cli.bench_engine import register_engine
from wmtp_jax.cli.output import note, print_json
from wmtp_jax.folders import DEMO, model_folder
from wmtp_jax.option_checks import require

_PACKAGED = "the packaged held-out text"
_Model = Annotated[str, typer.Option(metavar="PATH", help="A model folder or hub id.")]
_Text = Annotated[Path | None, typer.Option(help="UTF-8 text or JSON lines.", show_default=_PACKAGED)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Gamma = Annotated[int, typer.Option(help="Drafted tokens a step.")]
_Window = Annotated[int, typer.Option(help="Tokens the draft head sees; 0 is all.")]
_Sink = Annotated[int, typer.Option(help="First tokens it sees besides a window.")]
_NewTokens = Annotated[int, typer.Option(help="After each prompt.")]


def register(app: typer.Typer) -> None:
    """Adds the group and its commands."""
    bench = typer.Typer(help="Measure acceptance, speed and start-up.", no_args_is_help=True, rich_markup_mode=None)
    bench.command("accept")(accept_command)
    bench.command("versus-hf")(versus_hf_command)
    bench.command("start")(start_command)
    bench.command("step")(step_command)
    bench.command("memory")(memory_command)
    register_clp(bench)
    register_engine(bench)
    app.add_typer(bench, name="bench")


def accept_command(
    model: _Model = DEMO,
    tasks: Annotated[str, typer.Option(help=f"Of {', '.join(settings.TASKS)}.")] = settings.CONTINUATION,
    gamma: _Gamma = settings.AcceptOptions.gamma,
    windows: Annotated[str, typer.Option(help="Draft windows; native or 0 is none.")] = "native,128,512,1024",
    sinks: Annotated[str, typer.Option(help="First tokens that each window is joined by.")] = "4",
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts; 4K is 4096.")] = "512,2048,4096,16384",
    new_tokens: _NewTokens = settings.AcceptOptions.new_tokens,
    prompts: Annotated[int, typer.Option(help="Prompts of each task.")] = settings.AcceptOptions.prompts,
    rows: Annotated[int, typer.Option(help="Prompts that run as one batch.")] = settings.AcceptOptions.rows,
    text: _Text = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = settings.AcceptOptions.temperature,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = settings.AcceptOptions.seed,
    trained_context: Annotated[
        int | None, typer.Option(help="Mark contexts beyond it.", show_default="the model's own")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw it.", show_default=False)] = None,
    json: _Json = False,
) -> None:
    """Acceptance of drafts by position, native and windowed, as the context grows, on text and on long tasks."""
    given = settings.AcceptOptions(
        tasks=settings.parse_names(tasks),
        gamma=gamma,
        windows=settings.parse_windows(windows),
        sinks=settings.parse_counts("sinks", sinks),
        contexts=settings.parse_contexts(contexts),
        new_tokens=new_tokens,
        prompts=prompts,
        rows=rows,
        temperature=temperature,
        seed=seed,
    )
    from wmtp_jax.bench import accept, accept_plot, accept_tables, picture, tables

    if plot is not None:
        picture.require_plot(plot)
    loaded = _load(model)
    own = settings.DEMO_TRAINED_CONTEXT if model == DEMO else accept.trained_context(loaded.config)
    limit = own if trained_context is None else trained_context
    results, positions = accept.measure(loaded, given, text, limit, note), loaded.config.max_positions
    if json:
        contexts_json = [dict(same_text=result.same_text, **vars(result)) for result in results]
        limits = dict(trained_context=limit, max_positions=positions)
        print_json(dict(model=model, options=given, **limits, contexts=contexts_json))
    else:
        for table in accept_tables.accept_tables(results, given, limit, positions):
            tables.show(table)
    # Last: whatever goes wrong with a picture, the figures are out.
    if plot is not None:
        accept_plot.plot_acceptance(results, plot)


def versus_hf_command(
    model: Annotated[str, typer.Option(metavar="PATH", help="A Hugging Face folder or hub id.")] = DEMO,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 text to continue.", show_default=_PACKAGED)] = None,
    prompt_tokens: Annotated[int, typer.Option(help="How much of it.")] = 512,
    new_tokens: _NewTokens = settings.VersusOptions.new_tokens,
    gamma: _Gamma = settings.VersusOptions.gamma,
    window: _Window = settings.VersusOptions.window,
    sink: _Sink = settings.VersusOptions.sink,
    repeats: Annotated[int, typer.Option(help="Measured rounds.")] = settings.VersusOptions.repeats,
    threads: Annotated[int, typer.Option(help="Of every contender.")] = settings.VersusOptions.threads,
    json: _Json = False,
) -> None:
    """Decode speed beside Hugging Face transformers on the same checkpoint and prompt, in float32 on this CPU."""
    given = settings.VersusOptions(
        new_tokens=new_tokens, gamma=gamma, window=window, sink=sink, repeats=repeats, threads=threads
    )
    require("prompt-tokens", prompt_tokens, 1)
    from wmtp_jax.bench import prompts, tables, timing, versus_hf

    versus_hf.require_transformers()
    folder = prompts.hugging_face_folder(model)
    with timing.limited_to(threads):
        loaded = _load(str(folder), "float32")
        prompt = prompts.beginning(loaded.encode, prompt_file, prompt_tokens)
        race = versus_hf.versus_hf(folder, loaded, prompt, given, note)
    if json:
        timings = {name: _timing(race, name) for name in race.timings}
        sizes = dict(prompt_tokens=race.prompt_tokens, new_tokens=race.new_tokens, threads=race.threads)
        print_json(dict(model=model, options=given, **sizes, contenders=timings))
    else:
        tables.show(tables.race_table(race))


def start_command(
    model: _Model = DEMO,
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "64,8192,16384",
    new_tokens: _NewTokens = settings.StartOptions.new_tokens,
    gamma: _Gamma = settings.StartOptions.gamma,
    window: _Window = settings.StartOptions.window,
    sink: _Sink = settings.StartOptions.sink,
    repeats: Annotated[int, typer.Option(help="Warm runs.")] = settings.StartOptions.repeats,
    text: _Text = None,
    json: _Json = False,
) -> None:
    """Time from `wmtp generate` to its first text, cold and warm, and its peak memory."""
    given = settings.StartOptions(
        contexts=settings.parse_contexts(contexts),
        new_tokens=new_tokens,
        gamma=gamma,
        window=window,
        sink=sink,
        repeats=repeats,
    )
    from wmtp_jax.bench import start
    from wmtp_jax.bench.prompts import beginning_as_text

    folder = model_folder(model)
    prompts = [beginning_as_text(folder, text, tokens) for tokens in given.contexts]
    results = start.measure_starts(str(folder), prompts, given, note)
    # Only now may this process grow: see the module.
    from wmtp_jax.bench import tables
    from wmtp_jax.bench.footprint import footprint

    loaded = _load(model)
    run = dict(max_new_tokens=new_tokens, gamma=gamma, window=window, sink=sink if window else 0)
    needs = [footprint(loaded, tokens, **run) for _, tokens in prompts]
    if json:
        starts = [dict(vars(result), **vars(need)) for result, need in zip(results, needs, strict=True)]
        print_json(dict(model=model, options=given, starts=starts))
    else:
        tables.show(tables.start_table(results, needs))


def step_command(
    preset: Annotated[str, typer.Option(help="A preset's name, or a TOML file.")] = "proxy_35b",
    gamma: _Gamma = settings.StepOptions.gamma,
    window: Annotated[int, typer.Option(help="Of the windowed draft.")] = settings.StepOptions.window,
    sink: _Sink = settings.StepOptions.sink,
    contexts: Annotated[str, typer.Option(help="Tokens in the caches, as 4096, 64K or 1M.")] = "1K,4K,16K,64K,256K,1M",
    modes: Annotated[str, typer.Option(help="What to time.")] = ",".join(settings.STEP_MODES),
    rows: Annotated[int, typer.Option(help="Rows of one batch.")] = settings.StepOptions.rows,
    steps: Annotated[int, typer.Option(help="Steps a call of the loop.")] = settings.StepOptions.steps,
    repeats: Annotated[int, typer.Option(help="Measured rounds.")] = settings.StepOptions.repeats,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="Also float16, int8 or float8_e4m3fn.", show_default="the weights'")
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="reference, xla, mosaic_gpu or mosaic_tpu.", show_default="chosen")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the step costs into this PNG file.")] = None,
    json: _Json = False,
) -> None:
    """The cost of a step by phase as the context grows, with random weights and caches: no text, only time."""
    given = settings.StepOptions(
        gamma=gamma,
        window=window,
        sink=sink,
        contexts=settings.parse_contexts(contexts),
        modes=settings.parse_names(modes),
        rows=rows,
        steps=steps,
        repeats=repeats,
        dtype=_dtype(dtype),
        cache_dtype=cache_dtype,
    )
    from pallas_kernels.dispatch import require_kernels
    from wmtp_jax.bench import machine, picture, step, step_plot, step_table, synthetic, tables
    from wmtp_jax.compilation_cache import enable_compilation_cache
    from wmtp_jax.models.decoder import with_kernels
    from wmtp_jax.presets import model_config, read_preset

    enable_compilation_cache()
    require_kernels(kernels)
    if plot:
        picture.require_plot(plot)
    config = model_config(read_preset(preset), preset)
    note("measuring this machine")
    measured = machine.measure_machine(given.dtype)
    note(f"{preset}: making random weights")
    model = with_kernels(synthetic.synthetic_model(config, given.dtype), kernels)
    results = step.measure_steps(model, measured, given, note)
    if json:
        rounds = [dict(gain=result.gain, **vars(result)) for result in results]
        print_json(dict(preset=preset, kernels=kernels, options=given, machine=measured, contexts=rounds))
    else:
        tables.show(step_table.step_table(results, measured, given))
    # Last: whatever goes wrong with a picture, the figures are out.
    if plot:
        step_plot.plot_steps(results, f"{preset}, gamma {gamma}, window {window}, {measured.device}", plot)


def memory_command(
    preset: Annotated[str, typer.Option(help="A preset's name, or a TOML file.")] = "proxy_35b",
    pool: Annotated[str, typer.Option(help="Memory for the rows, as 8GB or 500MB.")] = "8GB",
    context: Annotated[str, typer.Option(help="Tokens of every row, as 64K or 1M.")] = "64K",
    gamma: _Gamma = settings.MemoryOptions.gamma,
    window: Annotated[int, typer.Option(help="Of the windowed draft.")] = settings.MemoryOptions.window,
    sink: _Sink = settings.MemoryOptions.sink,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    json: _Json = False,
) -> None:
    """How many rows one memory really admits with a native draft cache and with the ring."""
    from wmtp_jax.units import parse_bytes, parse_tokens

    given = settings.MemoryOptions(
        pool_bytes=parse_bytes(pool, "pool"),
        context=parse_tokens(context),
        gamma=gamma,
        window=window,
        sink=sink,
        dtype=_dtype(dtype),
    )
    from wmtp_jax.bench import memory, memory_table, tables
    from wmtp_jax.presets import model_config, read_preset

    results = memory.measure_memory(model_config(read_preset(preset), preset), given, note)
    if json:
        rows = [dict(vars(result), row_bytes=result.row_bytes, draft_share=result.draft_share) for result in results]
        print_json(dict(preset=preset, options=given, admissions=rows))
    else:
        tables.show(memory_table.memory_table(results, given))


def _dtype(given: str | None) -> str:
    from wmtp_jax.dtypes import parse_dtype

    return parse_dtype(given, "--dtype ").name


def _load(model: str, dtype: str | None = None) -> Any:
    from wmtp_jax.compilation_cache import enable_compilation_cache
    from wmtp_jax.model import load

    enable_compilation_cache()
    return load(model, dtype=dtype)


def _timing(race: Any, name: str) -> dict[str, Any]:
    timing, divergence = race.timings[name], race.divergences[name]
    return dict(
        tokens_per_second=timing.tokens_per_second.median,
        ratio=race.ratios[name],
        same_text=divergence is None,
        divergence=divergence,
        rounds=dict(
            tokens_per_second=timing.tokens_per_second, first_seconds=timing.first_seconds, seconds=timing.seconds
        ),
    )
