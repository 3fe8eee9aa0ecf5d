"""lm-evaluation-harness runs a saved model like any other, without a network."""

import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import FAMILIES, logits_of, tiny_decoder
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, train_tokenizer
from attention_priors.models import PriorDecoderForCausalLM
from processes import run_command

pytest.importorskip("lm_eval")

QUESTIONS = [
    ("The sky is", [" blue", " wet and cold", " a"]),
    ("Water is", [" dry", " wet"]),
    ("To be or not to be, that is the", [" question", " answer", " mind of the king"]),
    ("A prior says where to", [" look", " go"]),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PriorDecoderForCausalLM, PreTrainedTokenizerFast, Path]:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_decoder(torch.float32, **FAMILIES["GOAT"], vocab_size=270)
    text = " ".join(question + answer for question, answers in QUESTIONS for answer in answers)
    tokenizer = train_tokenizer([Document("text", text * 2)], 270)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


def log_likelihood(
    model: PriorDecoderForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str, answer: str
) -> float:
    """Return the log-likelihood of the answer's tokens after the question, in nats."""
    before, whole = tokenizer.encode(question), tokenizer.encode(question + answer)
    logs = logits_of(model, torch.tensor([whole]))[0].log_softmax(-1)
    return sum(float(logs[place - 1, whole[place]]) for place in range(len(before), len(whole)))


def write_task(folder: Path, model: PriorDecoderForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[list[float]]:
    """Write a multiple-choice task of local files in which the model answers three of four questions correctly."""
    scores = [
        [log_likelihood(model, tokenizer, question, answer) for answer in answers] for question, answers in QUESTIONS
    ]
    best = [each.index(max(each)) for each in scores]
    best[2] = (best[2] + 1) % 3
    rows = [
        {"question": question, "choices": answers, "answer": answer}
        for (question, answers), answer in zip(QUESTIONS, best, strict=True)
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "choices.yaml").write_text(
        f"""
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "rows.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
    )
    return scores


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Disable the network, and use a separate cache."""
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **settings}


def test_python_entry_runs_the_model(
    saved: tuple[PriorDecoderForCausalLM, PreTrainedTokenizerFast, Path],
    offline: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from lm_eval.tasks import TaskManager

    # lm_eval's own annotations and lazy names mislead type checkers.
    datasets: Any = importlib.import_module("datasets")
    lm_eval: Any = importlib.import_module("lm_eval")
    # datasets read the environment at import, maybe in another test.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model, tokenizer, folder = saved
    scores = write_task(tmp_path, model, tokenizer)
    found: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "device": "cpu"},
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=3,
        log_samples=True,
        bootstrap_iters=0,
    )
    assert found["results"]["choices"]["acc,none"] == 0.75
    for sample, expected in zip(found["samples"]["choices"], scores, strict=True):
        logs = [float(answer[0][0]) for answer in sample["resps"]]
        assert all(math.isclose(one, other, abs_tol=1e-3) for one, other in zip(logs, expected, strict=True))


@pytest.mark.deep  # a new process takes 20 seconds; test_auto_classes.py also tests that it finds the saved classes
def test_command_line_runs_the_model(
    saved: tuple[PriorDecoderForCausalLM, PreTrainedTokenizerFast, Path], offline: dict[str, str], tmp_path: Path
) -> None:
    """Runs the command of docs/hugging-face.md. Only the code saved beside the weights imports this package."""
    model, tokenizer, folder = saved
    write_task(tmp_path, model, tokenizer)
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--tasks", "choices", "--device", "cpu"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")]
    run_command(command, environment=offline)
    (results,) = (tmp_path / "results").rglob("results*.json")
    assert json.loads(results.read_text())["results"]["choices"]["acc,none"] == 0.75
