"""Whole evaluations of small random models: every task, resumed, repeated, extended, stopped."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import known_models
import model_folders
import pytest
import torch
import transformers as hf
from known_models import markdown

from attention_priors.lab.evaluate import Observer, Summary, evaluate
from attention_priors.lab.evaluate.records import Records
from attention_priors.lab.evaluate.summary import summarize
from attention_priors.lab.intervals import mean_interval, wilson_interval
from attention_priors.lab.report import evaluation_results, write_evaluation_figures
from attention_priors.lab.tasks import CopyMixture, CopyMixtureRows, EvaluationPlan, Subject
from attention_priors.lab.tasks.copying import copying_rows
from attention_priors.lab.tasks.generation import token_losses
from attention_priors.lab.tasks.passkey import PasskeyRetrieval
from attention_priors.lab.tasks.plan import TASKS
from thoroughness import DEEP, every_other_deep
from written_pages import ROOT

KINDS = pytest.mark.parametrize("kind", model_folders.KINDS)
# The example of variable_tracking does not fit with the tokenizer of these models.
OF_TEXT = [task for task in TASKS if task not in ("genome_completion", "copying", "variable_tracking")]
RETRIEVAL = [task for task in OF_TEXT if not task.startswith(("perplexity", "passkey_weight", "timing"))]


@pytest.fixture(scope="module")
def subjects(folders: dict[str, Path]) -> dict[str, Subject]:
    found = {kind: Subject.load(folders[kind]) for kind in model_folders.KINDS}
    for subject in found.values():
        generation: Any = subject.model.generation_config
        generation.eos_token_id = list(range(0, 400, 4))  # makes answers end early
    return found


@pytest.fixture
def plan(folders: dict[str, Path]):
    def make(*tasks: str, lengths: tuple[int, ...] = (200, 260), **changes: Any) -> EvaluationPlan:
        settings = {"depths": 2, "corpus": str(folders["texts"]), "documents": 2, "passes": 2}
        return EvaluationPlan.model_validate({"tasks": tasks, "lengths": lengths} | settings | changes)

    return make


@contextmanager
def counted(subject: Subject) -> Iterator[list[int]]:
    """Record the number of texts in each forward pass."""
    passes: list[int] = []
    handle = subject.model.register_forward_hook(
        lambda module, args, kwargs, out: passes.append(len(args[0])), with_kwargs=True
    )
    try:
        yield passes
    finally:
        handle.remove()


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def results(output: Path) -> list[dict[str, Any]]:
    return [line for line in lines(output) if "identity" not in line]


def totals(summary: Summary, kind: str, *fields: str) -> list[Any]:
    """Return these fields of the totals of one kind, as tuples, or as they are if it is one field."""
    rows = [[row[field] for field in fields] for row in summary.totals if row["row"] == kind]
    return [row[0] if len(row) == 1 else tuple(row) for row in rows]


@KINDS
def test_every_task_is_evaluated(kind: str, subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    told: list[tuple[str, float, float]] = []
    observer = Observer(on_work=lambda *report: told.append(report))
    summary = evaluate(subjects[kind], plan(*OF_TEXT, lengths=(600,)), tmp_path, chunk=128, observer=observer)
    assert totals(summary, "retrieval", "task") == RETRIEVAL
    assert totals(summary, "perplexity", "task") == ["perplexity", "perplexity_short", "perplexity_windows"]
    assert totals(summary, "timing", "pass") == ["forward", "forward+backward", "decode"]
    assert totals(summary, "timing", "passes") == [2, 2, 20]
    heads = [(layer, head) for layer in (0, 1) for head in range(4)]
    assert totals(summary, "needle_weight", "layer", "head") == heads
    assert {what for what, _, _ in told} == set(OF_TEXT)
    assert all(0 <= done <= total * (1 + 1e-9) for _, done, total in told)
    of_text = [done / total for what, done, total in told if what == "perplexity"][: 600 // 128 + 1]
    assert of_text == pytest.approx([(read / 600) ** 2 / 2 for read in (128, 256, 384, 512, 599)])
    identities = {line["run"]: line["identity"] for line in lines(tmp_path) if "identity" in line}
    assert [identity["task"] for identity in identities.values()] == OF_TEXT
    page = (ROOT / "docs/result-rows.md").read_text(encoding="utf-8")
    (described,) = re.findall(r"## `evaluate`: `results.jsonl`\n(.*?)\n## ", page, re.DOTALL)
    for line in results(tmp_path):
        assert line.keys() <= {*re.findall(r"`(\w+)`", described)}
        identity = identities[line["run"]]
        assert identity["task"] == line["task"]
        assert line["model"] == subjects[kind].name
        assert {key: identity[key] for key in ("model", "tokenizer", "dtype", "begin", "end")} == subjects[
            kind
        ].identity()
        if line["task"] in RETRIEVAL:
            assert 400 < line["tokens"] <= 600
            assert (line["tokens"] == 600) == line["task"].startswith("passkey")
            assert 0 <= line["score"] <= 1
            assert all(line["expected"])
            assert ("token_accuracy" in line) == ("tokens_right" in line) == line["task"].startswith("passkey")
            if "tokens_right" in line:
                assert len(line["tokens_right"]) == len(line["expected"][0])  # one token per digit
                assert line["token_accuracy"] == pytest.approx(sum(line["tokens_right"]) / len(line["tokens_right"]))
                assert line["score"] == all(line["tokens_right"]) == (min(line["margins"]) > 0)
    assert {len(line["expected"][0]) for line in results(tmp_path) if line["task"] == "passkey_8"} == {8}
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["task"] for entry in log] == [task for task in OF_TEXT if task != "timing"]
    assert all(entry["texts"] == 2 and not entry["interrupted"] for entry in log)


def assert_results_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Losses and margins may differ by rounding, all else is equal."""
    for line, right in zip(found, expected, strict=True):
        assert line.keys() == right.keys()
        for name, value in line.items():
            if name == "losses":
                for one, another in zip(value, right[name], strict=True):
                    assert one == pytest.approx(another, rel=1e-4)
            elif name == "margins":
                assert value == pytest.approx(right[name], abs=2e-4)
            else:
                assert value == right[name]


@pytest.mark.parametrize("kind", every_other_deep(model_folders.KINDS, ["ours", "llama"]))
def test_chunks_and_batches_change_no_result(kind: str, subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    tasks = ("passkey", "passkey_corpus", "niah_single_1", "niah_multikey_2", "perplexity")
    found = []
    for chunk, batch in ((1000, 1), (23, 1), (64, 3)):
        output = tmp_path / f"{chunk}-{batch}"
        evaluate(subjects[kind], plan(*tasks, lengths=(380,), depths=3), output, chunk=chunk, batch=batch)
        found.append(lines(output))
    # Single tokens take long.
    for chunk in (1, 1000):
        evaluate(subjects[kind], plan("passkey", lengths=(180,)), tmp_path / f"small-{chunk}", chunk=chunk)
    assert_results_close(lines(tmp_path / "small-1"), lines(tmp_path / "small-1000"))
    for other in found[1:]:
        assert_results_close(other, found[0])


def test_texts_of_a_batch_share_a_pass(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    with counted(subjects["ours"]) as passes:
        evaluate(subjects["ours"], plan("passkey", lengths=(200,), depths=5), tmp_path, chunk=1000, batch=3)
    assert passes == [3, 3, 2, 2]  # the prompt except its last token, and the rest


def test_a_repeated_evaluation_computes_and_writes_nothing(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    asked = plan("passkey", "niah_single_1", "perplexity", "timing", lengths=(380,))
    first = evaluate(subjects["llama"], asked, tmp_path)
    files = [tmp_path / name for name in ("results.jsonl", "log.jsonl")]
    before = [file.read_bytes() for file in files]
    with counted(subjects["llama"]) as passes:
        assert evaluate(subjects["llama"], asked, tmp_path, chunk=3, batch=2) == first
    assert passes == []
    assert [file.read_bytes() for file in files] == before


def test_an_extended_evaluation_measures_only_new_parts(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    subject = subjects["gpt2"]
    evaluate(subject, plan("passkey", lengths=(200,)), tmp_path)
    kept = (tmp_path / "results.jsonl").read_bytes()

    def passes_of(asked: EvaluationPlan, **options: Any) -> int:
        with counted(subject) as passes:
            evaluate(subject, asked, tmp_path, **options)
        return len(passes)

    assert (
        passes_of(plan("passkey", lengths=(180, 200, 260), stop_after_zeros=None)) == 2 * 2 * 2
    )  # lengths, depths, parts of a text
    assert passes_of(plan("passkey", lengths=(180, 200, 260), trials=3, stop_after_zeros=None), batch=2) == 3 * 2 * 2
    assert passes_of(plan("passkey", "passkey_8", lengths=(200,))) == 2 * 2
    assert (tmp_path / "results.jsonl").read_bytes().startswith(kept)
    # Settings that a task does not use do not change its identity. A seed and other depths do.
    assert passes_of(plan("passkey", lengths=(200,), documents=9, passes=5, stop_after_zeros=None)) == 0
    assert passes_of(plan("passkey", lengths=(200,), seed=1)) == 2 * 2
    assert passes_of(plan("passkey", lengths=(200,), depths=3)) == 3 * 2


def test_the_summary_covers_only_the_plan(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    small = plan("passkey", "perplexity", lengths=(200,))
    alone = evaluate(subjects["gpt2"], small, tmp_path / "alone")
    large = plan("passkey", "perplexity", lengths=(200, 260), trials=2, documents=4)
    whole = evaluate(subjects["gpt2"], large, tmp_path)
    assert totals(whole, "retrieval", "length", "trials") == [(200, 4), (260, 4)]
    assert totals(whole, "perplexity", "length", "documents") == [(200, 4), (260, 4)]
    evaluate(subjects["llama"], small, tmp_path)
    assert evaluate(subjects["gpt2"], small, tmp_path) == alone


def test_a_changed_model_is_measured_again(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    subject = subjects["attached"]
    asked = plan("passkey", lengths=(200,))
    evaluate(subject, asked, tmp_path)
    name, parameter = next((n, p) for n, p in subject.model.named_parameters() if "prior" in n)
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter += 0.1
    try:
        with counted(subject) as passes:
            evaluate(subject, asked, tmp_path)
        assert len(passes) == 4, name
    finally:
        with torch.no_grad():
            parameter.copy_(before)
    runs = [line for line in lines(tmp_path) if "identity" in line]
    assert len(runs) == 2
    assert len({run["identity"]["model"] for run in runs}) == 2


def test_a_corpus_is_identified_by_its_text(
    subjects: dict[str, Subject], folders: dict[str, Path], plan: Any, tmp_path: Path
):
    tasks = ("passkey_corpus", "niah_single_2", "perplexity")
    moved, changed = tmp_path / "moved/texts", tmp_path / "changed/texts"

    def texts(corpus: Path, subject: Subject = subjects["llama"]) -> dict[str, str]:
        return evaluate(subject, plan(*tasks, lengths=(380,), corpus=str(corpus)), tmp_path / "out").texts

    before = texts(folders["texts"])
    assert set(before) == set(tasks)
    for folder in (moved, changed):
        shutil.copytree(folders["texts"], folder)
    with (changed / "03.txt").open("a") as file:
        file.write("Another line.\n")
    with counted(subjects["llama"]) as passes:
        assert texts(moved) == before
        assert passes == []
        after = texts(changed)
    assert passes
    assert all(after[task] != before[task] for task in tasks)
    assert len([line for line in lines(tmp_path / "out") if "identity" in line]) == 6
    # The summary covers the texts of this call, in any order of the file, for any weights.
    assert texts(folders["texts"]) == before
    assert texts(folders["texts"], subjects["ours"]) == before


def test_every_length_reads_equal_documents(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    asked = plan("perplexity", lengths=(100, 200, 900), documents=3)
    summary = evaluate(subjects["ours"], asked, tmp_path)
    read: dict[int, set[str]] = {}
    for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if "document" in found:
            read.setdefault(found["length"], set()).add(found["document"])
    assert read[100] == read[200] == read[900]
    assert totals(summary, "perplexity", "documents") == [len(read[900])] * 3


def test_skipped_files_are_reported(subjects: dict[str, Subject], folders: dict[str, Path], plan: Any, tmp_path: Path):
    shutil.copytree(folders["texts"], tmp_path / "texts")
    (tmp_path / "texts/latin.txt").write_bytes("Übermut.".encode("latin-1"))
    asked = plan("perplexity", "niah_single_2", lengths=(380,), corpus=str(tmp_path / "texts"))
    told: list[str] = []
    evaluate(subjects["llama"], asked, tmp_path / "out", observer=Observer(on_message=told.append))
    assert told[0] == "corpus: left out: latin.txt: it is not UTF-8 (byte 0)"
    assert sum("left out" in message for message in told) == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_positions_need_one_pass(kind: str, plan: Any, tmp_path: Path):
    """Beyond 128 tokens, their frequencies depend on the whole length. Cached keys would keep the frequencies of
    earlier chunks.
    """
    subject = Subject.load(model_folders.save(length_dependent(kind), model_folders.tokenizer(), tmp_path / kind))
    asked = plan("perplexity", "passkey", lengths=(200, 260))
    with pytest.raises(
        ValueError, match=rf"chunk must be at least .* 264 tokens, got 263: .* type '{kind}' change .* beyond 128"
    ):
        evaluate(subject, asked, tmp_path / "out", chunk=263)
    assert not (tmp_path / "out").exists()
    text = torch.randint(400, (260,), generator=torch.Generator().manual_seed(0))

    def once(length: int) -> Any:
        fresh = length_dependent(kind)
        with torch.no_grad():
            logits = fresh(text[None, : length - 1]).logits[0]  # the last token is not read
        return torch.nn.functional.cross_entropy(logits, text[1:length], reduction="none").double()

    # Earlier texts do not matter. Chunks match while frequencies are those of the first length.
    for length, chunk in ((260, 260), (200, 200), (128, 50)):
        (found,) = token_losses(subject.model, text[None, :length], chunk=chunk)
        torch.testing.assert_close(found, once(length), atol=1e-4, rtol=1e-4)
    evaluate(subject, asked, tmp_path / "out", chunk=264)


def length_dependent(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {"vocab_size": 400, "initializer_range": 0.3, "rope_theta": 10000.0, **sizes}
    if kind == "dynamic":
        rotary = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        return hf.LlamaForCausalLM(hf.LlamaConfig(max_position_embeddings=128, rope_parameters=rotary, **common)).eval()
    rotary = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "rope_theta": 10000.0}
    rotary["original_max_position_embeddings"] = 128
    config = hf.LlamaConfig(max_position_embeddings=512, rope_parameters=rotary, **common)
    return hf.LlamaForCausalLM(config).eval()


def test_texts_beyond_rotary_positions_raise_an_early_warning(plan: Any, tmp_path: Path):
    folder = model_folders.save(length_dependent("dynamic"), model_folders.tokenizer(), tmp_path / "short")
    subject = Subject.load(folder)
    told: list[str] = []
    observer = Observer(on_work=lambda what, done, total: told.append(what), on_message=told.append)
    evaluate(subject, plan("perplexity", lengths=(128,)), tmp_path / "out", observer=observer)
    assert {*told} == {"perplexity"}
    told.clear()
    evaluate(subject, plan("perplexity", lengths=(200,)), tmp_path / "out", observer=observer)
    assert told[0].startswith("Texts have up to 200 tokens, but the config of ")
    assert told[0].endswith(" states 128 positions: rotary positions beyond them were not trained")


def test_tasks_stop_at_zero_accuracy(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    subject, lengths = subjects["ours"], (180, 200, 230, 260)
    messages: list[str] = []
    observer = Observer(on_message=messages.append)
    stopped = evaluate(subject, plan("passkey", lengths=lengths), tmp_path, observer=observer)
    reason = "nothing right at 2 lengths running (180, 200 tokens)"
    assert messages == [f"passkey: {reason}; longer texts are skipped"]
    assert totals(stopped, "retrieval", "length", "stopped") == [(180, None), (200, reason)]
    stops = [line for line in results(tmp_path) if "stopped_before" in line]
    assert [(line["stopped_before"], line["reason"]) for line in stops] == [(230, reason)]
    before = (tmp_path / "results.jsonl").read_bytes()
    assert evaluate(subject, plan("passkey", lengths=lengths), tmp_path) == stopped
    assert (tmp_path / "results.jsonl").read_bytes() == before  # recorded once

    lifted = evaluate(subject, plan("passkey", lengths=lengths, stop_after_zeros=None), tmp_path)
    assert totals(lifted, "retrieval", "length", "stopped") == [(length, None) for length in lengths]
    # Existing results are shown, and stay when the stopping rule returns.
    assert evaluate(subject, plan("passkey", lengths=lengths), tmp_path) == lifted


@pytest.mark.parametrize(
    ("right", "after", "stopped_after"),
    [
        ((0,), 1, (180,)),
        ((0, 0), 2, (180, 200)),
        ((0, 0.25, 0, 0), 2, (230, 260)),
        ((1, 0, 0), 2, (200, 230)),
        ((0, 1, 0, 0.5, 0), 2, None),
        ((0, 0, 0, 0, 0), None, None),
        ((1, 1, 1, 0, 0), 2, None),
    ],
)
def test_tasks_stop_after_consecutive_lengths_of_zero_accuracy(
    subjects: dict[str, Subject],
    plan: Any,
    tmp_path: Path,
    monkeypatch: Any,
    right: Any,
    after: Any,
    stopped_after: Any,
):
    lengths = (180, 200, 230, 260, 300)
    scores: dict[int, int] = dict(zip(lengths, right, strict=False))

    def ask(task: PasskeyRetrieval, length: int, units: Any) -> list[dict[str, Any]]:
        return [{"depth": 0.0, "score": scores[length] * (unit.key["depth_index"] == 0)} for unit in units]

    monkeypatch.setattr(PasskeyRetrieval, "ask", ask)
    found = evaluate(subjects["ours"], plan("passkey", lengths=lengths, stop_after_zeros=after), tmp_path)
    assert totals(found, "retrieval", "length") == [*lengths[: len(right)]]
    assert totals(found, "retrieval", "mean") == [score / 2 for score in right]
    assert totals(found, "retrieval", "low", "high") == [wilson_interval(score, 2) for score in right]
    *earlier, reason = totals(found, "retrieval", "stopped")
    if stopped_after is None:
        assert reason is None
    else:
        number = f"{len(stopped_after)} length{'s' * (len(stopped_after) > 1)}"
        assert reason == f"nothing right at {number} running ({', '.join(map(str, stopped_after))} tokens)"
    assert not any(earlier)


def test_interruptions_change_no_result(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    """Whole lines are kept and not measured again. The last line may be truncated."""
    subject, asked = subjects["gpt2"], plan("passkey", "niah_single_1", "perplexity", trials=2, lengths=(380, 400))
    summary = evaluate(subject, asked, tmp_path, batch=3)
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    assert len(whole) == 3 + 2 * (4 + 4 + 2)
    for kept in range(len(whole) - 1, -1, -1 if DEEP else -4):
        path.write_bytes(b"".join(whole[:kept]) + whole[kept][:-9])
        with counted(subject) as passes:
            assert evaluate(subject, asked, tmp_path, batch=3) == summary
        assert path.read_bytes() == b"".join(whole)
        if kept == len(whole) - 1:
            assert len(passes) == 1  # lines of the last document


def test_copying_loss_is_measured_by_kind(tmp_path: Path):
    mixture = CopyMixture(vocabulary_size=30, lag=3)
    subject = Subject("copier", known_models.tiny_decoder(prior="laplace"), None, mixture=mixture)
    asked = EvaluationPlan(tasks=("copying", "timing", "perplexity"), lengths=(12, 24), tokens=240, passes=1)
    found = evaluate(subject, asked, tmp_path)
    assert evaluate(subject, asked, tmp_path) == found
    for length in (12, 24):
        rows = CopyMixtureRows(mixture, context_length=length, num_rows=240 // length, seed=-1)
        samples = [rows.sample(index) for index in range(len(rows))]
        expected = copying_rows(subject.model, mixture, samples, chunk=1024)
        copying = [row for row in found.rows if row["row"] == "copying" and row["length"] == length]
        assert copying == [{"row": "copying"} | row for row in expected]
        assert [row["kind"] for row in expected] == ["first", "previous", "noise", "all"]
    assert totals(found, "timing", "length") == [12, 12, 12, 24, 24, 24]
    # The loss by position covers the beginnings of rows.
    assert totals(found, "perplexity", "length", "documents", "tokens") == [(12, 8, 88), (24, 8, 184)]
    rows = CopyMixtureRows(mixture, context_length=24, num_rows=8, seed=-1)
    losses = token_losses(subject.model, torch.stack([rows.sample(index).tokens for index in range(8)]), chunk=24)
    means = [float(losses[:, :11].mean()), float(losses.mean())]
    assert totals(found, "perplexity", "nll") == pytest.approx(means, rel=1e-5)
    with pytest.raises(ValueError, match="model 'copier' has no tokenizer: expected a model of text"):
        evaluate(subject, EvaluationPlan(tasks=("passkey",), lengths=(200,)), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_copying_needs_a_copy_mixture(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=r"tasks: 'copying' needs a model of a recipe with corpus\.copy_mixture"):
        evaluate(subjects["ours"], plan("copying"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_losses_are_averaged_over_tokens(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    found = evaluate(subjects["ours"], plan("perplexity", "perplexity_short", lengths=(690,), documents=3), tmp_path)
    for name in ("perplexity", "perplexity_short"):
        one, *places = (row for row in found.rows if row["task"] == name)
        texts = [line["losses"] for line in results(tmp_path) if line["task"] == name]
        sums = [sum(loss for _, _, loss in bins) for bins in texts]
        sizes = [bins[-1][1] for bins in texts]
        assert one["tokens"] == sum(sizes)
        assert one["nll"] == pytest.approx(sum(sums) / sum(sizes))
        # The interval is around the mean, also for texts of different sizes.
        assert (one["low"] + one["high"]) / 2 == pytest.approx(one["nll"])
        if name == "perplexity":
            assert (one["low"], one["high"]) == pytest.approx(mean_interval([loss / 689 for loss in sums]))
            assert one["documents"] == 3
        else:
            assert len(set(sizes)) > 1
        assert places[2]["position"] == pytest.approx((4 * 7) ** 0.5)
        assert places[2]["nll"] == pytest.approx(sum(bins[2][2] for bins in texts) / 4 / len(texts))


def test_losses_that_are_not_finite_are_recorded(
    subjects: dict[str, Subject], plan: Any, tmp_path: Path, monkeypatch: Any
):
    """Logits may overflow in half precision. Later texts are measured too."""

    def overflowed(model: Any, tokens: Any, **options: Any) -> Any:
        losses = token_losses(model, tokens, **options)
        losses[:, 100] = torch.inf
        return losses

    monkeypatch.setattr("attention_priors.lab.tasks.perplexity.token_losses", overflowed)
    weights = [[0.5, float("nan")], [0.25, 1.0]]
    monkeypatch.setattr("attention_priors.lab.tasks.passkey.needle_weights", lambda *_, **__: weights)
    asked = plan("perplexity", "passkey_weight", "passkey", lengths=(200,))
    found = evaluate(subjects["ours"], asked, tmp_path)
    unknown = [row["position"] for row in found.rows if row["row"] == "perplexity" and math.isnan(row["nll"])]
    assert unknown == [None, pytest.approx((64 * 127) ** 0.5)]
    assert [*map(math.isnan, totals(found, "needle_weight", "weight"))] == [False, True, False, False]
    assert len(totals(found, "retrieval")) == 1
    assert "not finite" in markdown(found)
    assert write_evaluation_figures(found, evaluation_results(found, "ours"), tmp_path / "figures")
    before = (tmp_path / "results.jsonl").read_bytes()
    assert b"null" in before
    again = evaluate(subjects["ours"], asked, tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert repr(again) == repr(found)


def test_windows_cover_all_documents(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    def texts(documents: int) -> list[str]:
        folder = tmp_path / str(documents)
        found = evaluate(subjects["ours"], plan("perplexity_windows", lengths=(200,), documents=documents), folder)
        lines = results(folder)
        # Each token except the first of a text has a loss.
        assert all(line["losses"][-1][1] == 199 for line in lines if "losses" in line)
        assert totals(found, "perplexity", "documents") == [sum("losses" in line for line in lines)]
        return [line["document"] for line in lines if "losses" in line]

    whole = texts(10**6)
    assert len(set(whole)) == len(whole)
    own = [name.rpartition("[")[2] for name in whole if name.rpartition("[")[0] == whole[0].rpartition("[")[0]]
    size = 200 - len(subjects["ours"].beginning())
    assert own == [f"{start}:{start + size}]" for start in range(0, size * len(own), size)]
    some = texts(len(whole) // 2)
    assert some == [whole[index * len(whole) // len(some)] for index in range(len(some))]


def test_whole_files_can_be_summarised(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    for kind in ("ours", "llama"):
        evaluate(subjects[kind], plan("passkey", lengths=(200, 260, 300)), tmp_path)
    whole = summarize(Records(tmp_path / "results.jsonl"))
    assert isinstance(whole, Summary)
    assert totals(whole, "retrieval", "length") == [200, 260] * 2
    assert all(totals(whole, "retrieval", "stopped")[1::2])
    assert [row["depth"] for row in whole.rows] == [0.0, 1.0] * 4


def test_learned_positions_need_room_for_the_answer(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    longest = model_folders.LONGEST
    fits = longest - 4  # four digits are read before the last is written
    evaluate(subjects["gpt2"], plan("passkey", "passkey_corpus", lengths=(fits,)), tmp_path / "fits")
    message = (
        rf"lengths: {fits + 1} tokens for the task 'passkey': .* a table of {longest} positions.* {longest + 1} tokens"
    )
    with pytest.raises(ValueError, match=message):
        evaluate(subjects["gpt2"], plan("passkey", lengths=(fits + 1,)), tmp_path / "new")
    with pytest.raises(ValueError, match="task 'perplexity'"):
        evaluate(subjects["gpt2"], plan("perplexity", lengths=(longest + 1,)), tmp_path / "new")
    # This task reads no answer.
    evaluate(
        subjects["gpt2"], plan("niah_single_1", "perplexity", "passkey_weight", lengths=(longest,)), tmp_path / "fits"
    )
    assert not (tmp_path / "new").exists()


def test_outputs_with_foreign_files_are_unchanged(subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    (tmp_path / "results.jsonl").write_text("notes")
    with counted(subjects["ours"]) as passes, pytest.raises(ValueError, match=r"results\.jsonl, line 1"):
        evaluate(subjects["ours"], plan("passkey"), tmp_path)
    assert passes == []
    assert (tmp_path / "results.jsonl").read_text() == "notes"


@pytest.mark.parametrize("name", ["chunk", "batch"])
def test_sizes_must_be_positive(name: str, subjects: dict[str, Subject], plan: Any, tmp_path: Path):
    sizes: Any = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
        evaluate(subjects["ours"], plan("passkey"), tmp_path / "new", **sizes)
    assert not (tmp_path / "new").exists()
