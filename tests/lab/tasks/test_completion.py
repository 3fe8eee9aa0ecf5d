"""Completion of a genome by a model: random draws, measurements, and stored results."""

import json
import random
from pathlib import Path
from typing import Any

import model_folders
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from known_models import markdown
from scipy.stats import pearsonr

from attention_priors.lab.data.genomes import nucleotide_tokenizer
from attention_priors.lab.evaluate import Summary, evaluate
from attention_priors.lab.evaluate.summary import summarize
from attention_priors.lab.intervals import mean_interval
from attention_priors.lab.report import evaluation_results, write_evaluation_figures
from attention_priors.lab.tasks import EvaluationPlan, Subject
from attention_priors.lab.tasks.completion import chance_identity, gc_correlation, gc_trajectory, identity
from attention_priors.lab.tasks.generation import continue_texts, draw_among
from attention_priors.lab.tasks.plan import COMPLETED
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

BASES = st.text(alphabet="ACGT", min_size=30, max_size=80)


def drawn(size: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=size))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.manual_seed(0)
    config = PriorDecoderConfig(
        vocab_size=6,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.1,
        prior="laplace",
    )
    made = PriorDecoderForCausalLM(config)
    return Subject.load(
        str(model_folders.save(made, nucleotide_tokenizer(), tmp_path_factory.mktemp("genomes") / "model"))
    )


@pytest.fixture(scope="module")
def genome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fasta") / "genome.fa"
    # The second record has unknown bases in place of the true continuation of its first piece.
    path.write_text(f">one\n{drawn(700, 1)}\n>two\n{drawn(200, 2)}NNNN{drawn(400, 3)}\n>three\n{drawn(150, 4)}\n")
    return path


def plan(genome: Path, **changes: Any) -> EvaluationPlan:
    settings: dict[str, Any] = {"tasks": ("genome_completion",), "lengths": (100,), "trials": 3, "corpus": str(genome)}
    return EvaluationPlan.model_validate(settings | changes)


@pytest.fixture(scope="module")
def whole(subject: Subject, genome: Path, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Return an evaluation of every piece in one call."""
    return evaluate(subject, plan(genome), tmp_path_factory.mktemp("whole"), chunk=64)


# ---- measurements


@given(text=BASES, window=st.integers(1, 30))
def test_the_trajectory_is_the_share_of_each_window(text: str, window: int):
    expected = [
        sum(base in "GC" for base in text[start : start + window]) / window for start in range(len(text) - window + 1)
    ]
    assert gc_trajectory(text, window) == pytest.approx(np.array(expected))


@given(text=BASES, seed=st.integers(0, 99))
def test_identity_and_correlation_of_known_continuations(text: str, seed: int):
    other = drawn(len(text), seed)
    assert identity(text, other) == sum(a == b for a, b in zip(text, other, strict=True)) / len(text)
    assert identity(text, text) == 1
    one, two = gc_trajectory(text), gc_trajectory(other)
    r = gc_correlation(text, other)
    if np.ptp(one) == 0 or np.ptp(two) == 0:
        assert r is None
    else:
        assert r == pytest.approx(pearsonr(one, two)[0], abs=1e-9)
    if gc_correlation(text, text) is not None:
        assert gc_correlation(text, text) == pytest.approx(1)


def test_chance_is_the_identity_of_random_letters():
    truth = "A" * 500 + "C" * 300 + "G" * 200
    assert chance_identity(truth) == pytest.approx(0.25 + 0.09 + 0.04)
    shuffled = list(truth)
    found = []
    for seed in range(200):
        random.Random(seed).shuffle(shuffled)
        found.append(identity("".join(shuffled), truth))
    assert np.mean(found) == pytest.approx(chance_identity(truth), abs=0.005)


def test_goat_figure_4c_one_prompt_cannot_tell_models_apart():
    def mean_of_three(truth: str) -> float:
        found = [gc_correlation("".join(draw.choices("ACGT", k=200)), truth) for _ in range(3)]
        return float(np.array(found, dtype=float).mean())

    draw = random.Random(0)
    truths = ["".join(draw.choices("ACGT", k=200)) for _ in range(1500)]
    differences = np.array([mean_of_three(truth) - mean_of_three(truth) for truth in truths])
    share = np.mean(np.abs(differences) > 0.466 - 0.320)
    assert share - 2 * np.sqrt(0.25 / len(truths)) > 0.5
    single = [gc_correlation(drawn(200, seed), drawn(200, 10_000 + seed)) for seed in range(1500)]
    assert np.std(np.array(single, dtype=float)) == pytest.approx(0.30, abs=0.015)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: identity("AC", "ACG"), "have 2 and 3"),
        (lambda: identity("", ""), "at least 1"),
        (lambda: gc_trajectory("ACG", 4), "window must be from 1 to the number of bases, 3; it is 4"),
    ],
)
def test_incomparable_continuations_are_refused(call: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        call()


# ---- random draws


def test_continuations_depend_only_on_their_generator(subject: Subject):
    prompt = torch.randint(1, 5, (1, 20), generator=torch.Generator().manual_seed(0))

    def draw(*seeds: int) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        choose = draw_among((1, 2, 3, 4), generators)
        return continue_texts(subject.model, prompt.expand(len(seeds), -1), 12, choose, chunk=7)

    one, two = draw(5, 6)
    assert one != two
    assert draw(6) == [two]
    assert draw(9, 5)[1] == one


def test_tokens_are_drawn_with_the_models_probabilities(subject: Subject):
    prompt = torch.randint(1, 5, (1, 20), generator=torch.Generator().manual_seed(1))
    among = (1, 2, 4)
    count = 4000
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    choose = draw_among(among, generators)
    found = continue_texts(subject.model, prompt.expand(count, -1), 1, choose, chunk=20)
    with torch.no_grad():
        chances = subject.model(prompt).logits[0, -1, list(among)].softmax(-1)
    shares = torch.tensor([[row[0] == token for token in among] for row in found]).double().mean(0)
    assert torch.allclose(shares, chances.double(), atol=4 * 0.5 / count**0.5)


# ---- evaluations


def test_pieces_are_completed_and_summarised(whole: Summary, tmp_path: Path):
    (completion,) = whole.totals
    ((length, pieces),) = whole.pieces.items()
    assert (completion["length"], completion["pieces"], completion["continuations"]) == (length, 3, 3)
    texts = {"one": drawn(700, 1), "two": drawn(200, 2) + "NNNN" + drawn(400, 3)}
    # 700 bases have two pieces of 300. 604 bases have only the second, because unknown bases follow the first.
    assert [piece.document for piece in pieces] == [
        "one:1-700[0:300]",
        "one:1-700[300:600]",
        "two:1-604[300:600]",
    ]
    for piece, start in zip(pieces, (0, 300, 300), strict=True):
        name = piece.document[:3]
        assert piece.expected == texts[name][start + 100 : start + 300]
        assert len(set(piece.found)) == len(piece.found) == 3
        assert all(len(found) == COMPLETED and set(found) <= set("ACGT") for found in piece.found)
    means = [np.mean([identity(found, piece.expected) for found in piece.found]) for piece in pieces]
    assert completion["identity"] == pytest.approx(np.mean(means))
    ends = (completion["identity_low"], completion["identity_high"])
    assert ends == pytest.approx(mean_interval([float(mean) for mean in means]))
    assert completion["chance"] == pytest.approx(0.25, abs=0.02)
    text = markdown(whole)
    assert f"| 100 | 3 | 3 | {100 * completion['identity']:.1f} [" in text
    figures = write_evaluation_figures(whole, evaluation_results(whole, "model"), tmp_path)
    assert [path.name for path in figures] == ["genome_completion.png"]


def test_more_trials_and_pieces_extend_the_results(subject: Subject, genome: Path, whole: Summary, tmp_path: Path):
    evaluate(subject, plan(genome, trials=1, documents=2), tmp_path / "grown", chunk=64)
    before = (tmp_path / "grown" / "results.jsonl").read_text()
    grown = evaluate(subject, plan(genome), tmp_path / "grown", chunk=64)
    assert (tmp_path / "grown" / "results.jsonl").read_text().startswith(before)
    # Random draws for a piece do not depend on other pieces.
    assert grown == whole
    few = evaluate(subject, plan(genome, documents=2), tmp_path / "few", chunk=64)
    assert set(few.pieces[100]) < set(grown.pieces[100])
    kept = [json.loads(line) for line in (tmp_path / "grown" / "results.jsonl").read_text().splitlines()]
    assert len(kept) == 1 + 9
    again = (tmp_path / "grown" / "results.jsonl").stat().st_mtime_ns
    assert evaluate(subject, plan(genome), tmp_path / "grown") == grown
    assert (tmp_path / "grown" / "results.jsonl").stat().st_mtime_ns == again
    assert summarize(kept).totals[0]["identity"] > 0


def test_incompatible_settings_are_refused_before_any_work(subject: Subject, genome: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"no document with 600 tokens followed by 200 known bases"):
        evaluate(subject, plan(genome, lengths=(100, 600)), tmp_path / "out")
    words = model_folders.save(model_folders.model("llama"), model_folders.tokenizer(), tmp_path / "llama")
    with pytest.raises(ValueError, match="'genome_completion' needs a model with the tokenizer 'nucleotides'"):
        evaluate(Subject.load(words), plan(genome), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_logits_that_are_not_finite_are_refused(subject: Subject, genome: Path, tmp_path: Path):
    broken = Subject.load(subject.name)
    head: Any = broken.model.get_output_embeddings()
    torch.nn.init.constant_(head.weight, torch.inf)
    with pytest.raises(ValueError, match=r"must give finite logits; in torch.float32 it gives \[(nan|inf)"):
        evaluate(broken, plan(genome), tmp_path / "out")


def test_losses_are_bits_per_base(subject: Subject, genome: Path, tmp_path: Path):
    summary = evaluate(subject, plan(genome, tasks=("perplexity_windows",)), tmp_path)
    (loss,) = summary.totals
    assert summary.of_bases
    tables = markdown(summary)
    assert f"| {loss['nll'] / np.log(2):.3f} |" in tables
    assert "bits per base" in tables
    assert "perplexity |" not in tables
