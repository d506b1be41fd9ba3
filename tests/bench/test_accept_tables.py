"""Acceptance of tasks and sinks side by side, as tables and as a picture."""

import sys
from pathlib import Path

import pytest
from rich.table import Table

from tests.bench.folders import tiny, write_words
from wmtp_jax.bench.accept import ContextResult, DrafterResult, measure
from wmtp_jax.bench.accept_plot import _draw, plot_acceptance
from wmtp_jax.bench.accept_tables import accept_tables, length_table, sink_table
from wmtp_jax.bench.options import AcceptOptions, parse_contexts, parse_counts, parse_names, parse_windows
from wmtp_jax.bench.picture import require_plot
from wmtp_jax.errors import UserError

OPTIONS = AcceptOptions(
    tasks=("variables", "continuation"), windows=(0, 5), sinks=(0, 2), contexts=(350, 300),
    new_tokens=20, prompts=2, rows=2, temperature=0.9,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[ContextResult]:
    return measure(tiny(), OPTIONS, write_words(tmp_path_factory.mktemp("words") / "a.txt"), 320, lambda line: None)


def cells(table: Table) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def titles(table: Table) -> list[str]:
    return [str(column.header) for column in table.columns]


def of(result: ContextResult, window: int, sink: int) -> DrafterResult:
    return next(drafter for drafter in result.drafters if (drafter.window, drafter.sink) == (window, sink))


def length(drafters: list[DrafterResult]) -> float:
    counts = [sum(column) for column in zip(*(drafter.histogram for drafter in drafters), strict=True)]
    return 1 + sum(n * count for n, count in enumerate(counts)) / sum(counts)


def test_tasks_are_run_like_continuations(results: list[ContextResult]) -> None:
    assert [(r.task, r.context) for r in results] == [(task, c) for task in OPTIONS.tasks for c in OPTIONS.contexts]
    for result in results:
        assert result.same_text
        assert result.prompts == 2
        assert sum(result.drafters[0].histogram) > 10
        assert any(sum(drafter.histogram[1:]) > 2 for drafter in result.drafters)


def test_lengths_have_a_line_a_task_and_context_and_a_column_a_drafter(results: list[ContextResult]) -> None:
    table = length_table(results)
    drafters = ["native", "5\nsink 0", "5\nsink 2"]
    assert titles(table) == ["task", "context", *drafters, "same text", "answered", "repeats"]
    lines = cells(table)
    assert [line[:2] for line in lines] == [[task, c] for task in OPTIONS.tasks for c in ("350*", "300")]
    for line, result in zip(lines, results, strict=True):
        assert [cell.split(" ± ")[0] for cell in line[2:5]] == [f"{length([d]):.2f}" for d in result.drafters]
        assert line[5] == "yes"
    assert [line[6] for line in lines] == ["0.0 %", "0.0 %", "", ""]


def test_the_gain_of_a_sink_is_over_all_tasks_of_a_context(results: list[ContextResult]) -> None:
    table = sink_table(results, OPTIONS)
    assert titles(table) == ["context", "sink", "window 5"]
    for line, context in zip(cells(table), OPTIONS.contexts, strict=True):
        own = [result for result in results if result.context == context]
        assert len(own) == 2
        gains = [length([of(r, 5, 2) for r in own]) - length([of(r, 5, 0) for r in own])]
        assert line[:2] == [str(context), "2"]
        assert [float(cell.split(" ± ")[0]) for cell in line[2:]] == pytest.approx(gains, abs=0.0051)


def test_one_task_and_one_sink_need_no_comparison(results: list[ContextResult]) -> None:
    assert len(accept_tables(results, OPTIONS, 320, 1000)) == 3
    single = AcceptOptions(contexts=(300,))
    (table,) = accept_tables(results[3:], single, 320, 1000)
    assert len(cells(table)) == 3


def test_a_picture_has_a_line_a_context_and_sink_that_ends_at_native(
    results: list[ContextResult], tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    panel = Figure().subplots()
    _draw(results[:2], panel)
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["5", "native"]
    lines = [container.lines[0] for container in panel.containers]
    expected = [[of(r, w, s if w else 0).acceptance_length.value for w in (5, 0)] for r in results[:2] for s in (0, 2)]
    assert [line.get_ydata().tolist() for line in lines] == expected
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 4
    plot_acceptance(results, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"the extra `plot` has \(pip install 'wmtp-jax\[plot\]'\)"):
        require_plot(tmp_path / "a.png")


def test_lists_are_read_with_units_and_names() -> None:
    assert parse_contexts("4K, 512,1m") == (4096, 512, 2**20)
    assert parse_counts("sinks", "0, 64") == (0, 64)
    assert parse_windows("native,1024, 7,0") == (0, 1024, 7, 0)
    assert parse_names("needles, common") == ("needles", "common")
