"""Whole benchmarks: written files, resumption, and messages about failures."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench_cases import WAYS, case, made, plainly, recipe

import attention_priors
from attention_priors.lab.bench import bench, load_bench_recipe, markdown_tables, measure
from attention_priors.lab.bench.measure import Runner
from attention_priors.lab.bench.results import IDENTITY
from attention_priors.lab.bench.run import CODE
from attention_priors.lab.bench.way import CannotRunError, Inputs, Pass, make_inputs
from attention_priors.lab.strict_yaml import RecipeError

LINUX = sys.platform == "linux"


def row_of(results: dict[str, Any], way: str, passing: str = "forward", length: int = 16) -> dict[str, Any]:
    (row,) = [r for r in results["rows"] if (r["way"], r["pass"], r["length"]) == (way, passing, length)]
    return row


def test_results_tables_and_figures_are_written(tmp_path, quiet, no_memory):
    ways = ("attend-alibi", "attend-goat", "formula-alibi")
    passes: tuple[Pass, ...] = ("forward", "forward+backward", "decode")
    results = bench(recipe(ways=ways, passes=passes, lengths=(16, 32)), tmp_path, console=quiet)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    # Baselines are measured too.
    for passing in passes:
        for length in (16, 32):
            seconds = {}
            for way in ("plain", *ways):
                row = row_of(results, way, passing, length)
                assert row["status"] == "measured"
                assert len(row["seconds"]) == 3
                assert all(value > 0 for value in row["seconds"])
                assert sorted(row["seconds"])[1] == row["median_seconds"][0]
                assert row["error"] < 1e-5
                assert row["calls"] >= 1
                assert row["peak_bytes"] is None
                seconds[way] = row["seconds"]
            row = row_of(results, "attend-goat", passing, length)
            assert row["baseline"] == "plain"
            expected = [a / b for a, b in zip(seconds["attend-goat"], seconds["plain"], strict=True)]
            assert row["ratios"] == expected
            assert row["median_ratio"][0] == sorted(expected)[1]
            (compared,) = [r for r in results["comparisons"] if (r["pass"], r["length"]) == (passing, length)]
            assert (compared["way"], compared["counterpart"]) == ("formula-alibi", "attend-alibi")
            pairs = zip(seconds["formula-alibi"], seconds["attend-alibi"], strict=True)
            assert compared["ratios"] == [a / b for a, b in pairs]
    assert results["settings"]["threads"] == 1
    assert results["versions"]["torch"] == torch.__version__
    assert {fit["way"] for fit in results["growth"] if fit["of"] == "time"} == {"plain", *ways}
    table = markdown_tables(results)
    for words in ("Time: forward+backward", "attend, GOAT", "dense formula, ALiBi", "L = 32", "What is timed"):
        assert words in table
    assert "Peak memory" not in table


def test_ways_are_measured_beside_neighbours(tmp_path, quiet, no_memory):
    results = bench(recipe(neighbours=1), tmp_path, console=quiet)
    row, plain = row_of(results, "attend-alibi"), row_of(results, "plain")
    busy = row["beside_neighbours"]
    pairs = zip(busy["seconds"], plain["beside_neighbours"]["seconds"], strict=True)
    assert busy["ratios"] == [a / b for a, b in pairs]
    assert len(busy["seconds"]) == len(row["seconds"]) == 3
    assert busy["seconds"] != row["seconds"]
    assert "Time beside 1 busy process: forward" in markdown_tables(results)


@pytest.mark.parametrize("flush", [False, True])
def test_denormal_numbers_count_as_0_only_if_asked(flush, tmp_path, quiet, no_memory):
    results = bench(recipe(flush_denormal=flush), tmp_path, console=quiet)
    assert ("denormal numbers count as 0" in markdown_tables(results)) == flush
    assert bool(torch.tensor([1e-39]).add(1e-39).eq(0)) == flush


def test_neighbours_are_busy_and_end():
    with measure.neighbours(2):
        own = [child for child in psutil.Process().children() if "getppid" in " ".join(child.cmdline())]
        assert len(own) == 2
        before = [child.cpu_times().user + child.cpu_times().system for child in own]
        time.sleep(0.3)
        after = [child.cpu_times().user + child.cpu_times().system for child in own]
    assert all(late > early for early, late in zip(before, after, strict=True))
    assert not any(child.is_running() for child in own)


def test_finished_measurements_are_reused(tmp_path, quiet, no_memory, monkeypatch):
    first = bench(recipe(), tmp_path, console=quiet)

    def never(self: Runner) -> float:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "measure", never)
        again = bench(recipe(), tmp_path, console=quiet)
    assert again["rows"] == first["rows"]
    # New ways and lengths are added to the existing ones.
    more = bench(recipe(ways=("formula-alibi",), lengths=(16, 24)), tmp_path, console=quiet)
    assert row_of(more, "attend-alibi") == row_of(first, "attend-alibi")
    assert row_of(more, "formula-alibi", length=24)["status"] == "measured"
    # New ways are measured beside their own baseline.
    row = row_of(more, "formula-alibi")
    assert row["ratios"] != [a / b for a, b in zip(row["seconds"], row_of(first, "plain")["seconds"], strict=True)]


def test_an_interrupted_benchmark_resumes_after_the_last_repetition(tmp_path, quiet, no_memory, monkeypatch):
    calls = {"left": 12}
    measure = Runner.measure

    def interrupted(self: Runner) -> float:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt
        return measure(self)

    wanted = recipe(repetitions=7)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench(wanted, tmp_path, console=quiet)
    (path,) = (tmp_path / "measurements").iterdir()
    kept = json.loads(path.read_text())["sittings"][0]["rounds"]
    assert 0 < len(kept) < 7
    assert not (tmp_path / "results.json").exists()
    results = bench(wanted, tmp_path, console=quiet)
    assert len(row_of(results, "plain")["seconds"]) == 7
    assert row_of(results, "plain")["seconds"][: len(kept)] == [entry["plain"] for entry in kept]


def test_a_contender_that_fails_is_shown_with_its_error(tmp_path, quiet, no_memory, monkeypatch):
    def fails(inputs: Inputs) -> torch.Tensor:
        raise NotImplementedError("no such\nkernel")

    def missing(inputs: Inputs) -> torch.Tensor:
        raise ModuleNotFoundError("No module named 'goat'", name="goat")

    monkeypatch.setitem(WAYS, "broken", made("broken", fails))
    monkeypatch.setitem(WAYS, "absent", made("absent", missing))
    monkeypatch.setitem(WAYS, "wrong", made("wrong", lambda inputs: 1.5 * plainly(inputs)))
    monkeypatch.setitem(WAYS, "right", made("right", plainly))
    wanted = recipe(ways=("broken", "absent", "wrong", "right"))
    results = bench(wanted, tmp_path, console=quiet)
    reasons = {row["way"]: row.get("reason") for row in results["rows"]}
    assert reasons["broken"] == "NotImplementedError: no such"
    assert reasons["absent"] == "goat-attention is not installed"
    assert "outputs differ from the reference" in reasons["wrong"]
    assert row_of(results, "right")["status"] == "measured"
    assert row_of(results, "broken")["status"] == "cannot run"
    table = markdown_tables(results)
    assert "made for a test: broken, forward, 16 tokens: cannot run: NotImplementedError: no such" in table
    before = json.loads((tmp_path / "measurements" / "forward-16.json").read_text())["sittings"]
    # The same command notices a repaired way. A way that still fails costs no new repetitions.
    bench(recipe(ways=("wrong", "broken")), tmp_path, console=quiet)
    assert json.loads((tmp_path / "measurements" / "forward-16.json").read_text())["sittings"] == before
    monkeypatch.setitem(WAYS, "broken", made("broken", plainly))
    assert row_of(bench(wanted, tmp_path, console=quiet), "broken")["status"] == "measured"


def test_ways_that_do_not_fit_into_memory_are_not_run(tmp_path, quiet, no_memory, monkeypatch):
    monkeypatch.setitem(WAYS, "huge", made("huge", plainly, kept=2**23, forward=2**22))
    results = bench(recipe(ways=("huge",)), tmp_path, memory_limit=20, console=quiet)
    row = row_of(results, "huge")
    assert (row["status"], row["reason"]) == ("not run", "needs 24.0 GiB; 20.0 GiB may be used")
    assert (
        row_of(bench(recipe(ways=("huge",)), tmp_path, memory_limit=25, console=quiet), "huge")["status"] == "measured"
    )


def test_incompatible_measurements_are_refused(tmp_path, quiet, no_memory):
    before = torch.get_num_threads()
    settings: dict[str, Any] = {"repetitions": 1, "threads": before + 1}
    bench(recipe(**settings), tmp_path, console=quiet)
    assert torch.get_num_threads() == before
    for changes, complaint in (
        ({"threads": before + 2}, rf"settings.threads \(there {before + 1}, here {before + 2}\)"),
        ({"head_dim": 32}, r"settings.head_dim \(there 24, here 32\)"),
        ({"seed": 1}, r"settings.seed \(there 0, here 1\)"),
    ):
        with pytest.raises(RecipeError, match=complaint):
            bench(recipe(**settings | changes), tmp_path, console=quiet)
    identity = json.loads((tmp_path / IDENTITY).read_text())
    (tmp_path / IDENTITY).write_text(json.dumps(identity | {"code": "0"}))
    with pytest.raises(RecipeError, match=r"or code; they differ in code \(there '0', here "):
        bench(recipe(**settings), tmp_path, console=quiet)


def test_the_code_fingerprint_covers_all_measured_files():
    """Files outside the patterns could change between measurements that are compared."""
    package = Path(attention_priors.__file__).parent
    covered = {path.relative_to(package).as_posix() for pattern in CODE for path in package.glob(pattern)}
    for file in ("attention/attend.py", "attention/tiles/__init__.py", "priors/laplace.py", "lab/bench/measure.py"):
        assert file in covered


@pytest.mark.skipif(not LINUX, reason="peak memory is Linux's to tell")
def test_peak_memory_excludes_the_inputs():
    """The dense formula with a given bias holds three matrices of queries by keys. Plain attention holds its output."""
    # Matrices of 268 MB. With the bounds of the Makefile, the allocator kept 31 MB in a test with 67 MB each.
    this = case(length=4096, heads=4, head_dim=16)
    plain = measure.peak(WAYS["plain"], this, 1)
    dense = measure.peak(WAYS["formula-alibi"], this, 1)
    output = 4 * this.heads * this.length * this.head_dim
    assert output <= plain < 4 * output + 2**20
    estimate = sum(WAYS["formula-alibi"].need(this))
    assert abs(dense - estimate) < 0.1 * estimate
    # An exception of the measuring process is returned as its message.
    with pytest.raises(CannotRunError, match="leaves no dimension for content"):
        measure.peak(WAYS["attend-goat-inside"], case(head_dim=16), 1)


def test_short_passes_are_measured_in_groups():
    this = case("decode")
    ran = []
    prepared = WAYS["plain"].prepare(this, make_inputs(this))

    def counted() -> torch.Tensor:
        ran.append(1)
        return prepared.run()

    runner = Runner(this, prepared._replace(run=counted))
    runner.warm_up()
    assert runner.calls > 1
    ran.clear()
    runner.measure()
    assert len(ran) == runner.calls


def test_the_published_recipes_are_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    paths = sorted((Path(__file__).parents[3] / "benchmarks").glob("*.yaml"))
    assert len(paths) >= 4
    for path in paths:
        assert load_bench_recipe(path).plan()


@pytest.mark.cuda
@pytest.mark.parametrize("passing", ["forward", "forward+backward"])
def test_passes_in_a_cuda_graph_are_replayed(passing: Pass):
    this = replace(case(passing, 256), device="cuda")
    prepared = WAYS["attend-ggd"].prepare(this, make_inputs(this))
    ran: list[None] = []

    def counted() -> torch.Tensor:
        ran.append(None)
        return prepared.run()

    runner = Runner(this, prepared._replace(run=counted), in_graph=True)
    runner.warm_up()
    assert runner.error < 1e-2
    number = len(ran)
    runner.measure()
    assert len(ran) == number
