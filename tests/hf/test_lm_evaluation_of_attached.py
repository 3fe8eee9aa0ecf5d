"""lm-evaluation-harness runs a saved model with attached priors through its Python entry."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

from attention_priors.hf import attach, attached_priors, load_attached
from attention_priors.lab.data import Document, train_tokenizer

pytest.importorskip("lm_eval")

QUESTIONS = [
    ("The sky is", [" blue", " wet and cold"]),
    ("Water is", [" dry", " wet"]),
    ("A prior says", [" no", " go"]),
]
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_multiple_choice_scores_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    datasets: Any = importlib.import_module("datasets")
    lm_eval: Any = importlib.import_module("lm_eval")
    wrapper: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = " ".join(question + answer for question, answers in QUESTIONS for answer in answers)
    tokenizer = train_tokenizer([Document("text", text * 2)], 270)
    eos: Any = tokenizer.eos_token_id
    ends = {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": eos}
    made = attach(tiny("llama", vocab_size=len(tokenizer), **ends), {"name": "generalized_gaussian", "init": "spread"})
    made.save_pretrained(tmp_path / "model")
    model = load_attached(tmp_path / "model").eval()
    assert attached_priors(model)

    def log_likelihood(question: str, answer: str) -> float:
        before, whole = tokenizer.encode(question), tokenizer.encode(question + answer)
        with torch.no_grad():
            logs = made(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(float(logs[place - 1, whole[place]]) for place in range(len(before), len(whole)))

    scores = [[log_likelihood(question, answer) for answer in answers] for question, answers in QUESTIONS]
    best = [each.index(max(each)) for each in scores]
    rows = [
        # The last question lists another answer as correct.
        {"question": question, "choices": answers, "answer": choice if place < 2 else 1 - choice}
        for place, ((question, answers), choice) in enumerate(zip(QUESTIONS, best, strict=True))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "choices.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    found: Any = lm_eval.simple_evaluate(
        model=wrapper(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=2),
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert found["results"]["choices"]["acc,none"] == pytest.approx(2 / 3)
    for sample, expected in zip(found["samples"]["choices"], scores, strict=True):
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(expected, abs=1e-4)
