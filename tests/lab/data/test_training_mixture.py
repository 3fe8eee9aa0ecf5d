import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from attention_priors.lab.data import Document, RetrievalShare, TrainingMixture, token_stream
from attention_priors.lab.data.packing import IGNORED_LABEL, collate_rows
from attention_priors.lab.tasks import PasskeyTexts

LENGTH = 320
ANSWER_WEIGHT = 7.0


@pytest.fixture(scope="module")
def make(tokenizer: PreTrainedTokenizerFast, documents: tuple[Document, ...], sentence_task: PasskeyTexts):
    def mixture(**changes: Any) -> TrainingMixture:
        arguments: dict[str, Any] = {"context_length": LENGTH, "num_rows": 400, "seed": 1}
        share: dict[str, Any] = {
            "texts": sentence_task,
            "ratio": 0.5,
            "minimum_length": 250,
            "answer_weight": ANSWER_WEIGHT,
        }
        arguments |= {name: value for name, value in changes.items() if name not in share}
        share |= {name: value for name, value in changes.items() if name in share}
        retrieval = [RetrievalShare(**share)] if share["ratio"] else []
        return TrainingMixture(token_stream(tokenizer, documents), retrieval=retrieval, **arguments)

    return mixture


def _is_passkey(row: dict[str, Tensor]) -> bool:
    return bool((row["loss_weights"] == ANSWER_WEIGHT).any())


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[field], second[field]) for field in first)


def test_rows_have_the_stated_shapes_and_types(make):
    for row in (make()[index] for index in range(50)):
        assert {field: (value.shape, value.dtype) for field, value in row.items()} == {
            "input_ids": ((LENGTH,), torch.int64),
            "labels": ((LENGTH,), torch.int64),
            "document_ids": ((LENGTH,), torch.int64),
            "loss_weights": ((LENGTH,), torch.float32),
        }


def test_document_ids_count_up_in_contiguous_runs(make):
    mixture = make(context_length=3000, minimum_length=None)
    rows = [mixture[index] for index in range(50)]

    for row in rows:
        steps = row["document_ids"].diff()
        assert int(row["document_ids"][0]) == 0
        assert set(steps.tolist()) <= {0, 1}
    assert any(int(row["document_ids"][-1]) >= 3 for row in rows)


def test_labels_are_the_tokens_except_the_first_of_each_document(make):
    mixture = make(context_length=3000, minimum_length=None)
    for row in (mixture[index] for index in range(50)):
        first = torch.ones(3000, dtype=torch.bool)
        first[1:] = row["document_ids"].diff() != 0
        assert (row["labels"][first] == IGNORED_LABEL).all()
        assert torch.equal(row["labels"][~first], row["input_ids"][~first])


def test_corpus_documents_end_where_their_id_changes(make, tokenizer: PreTrainedTokenizerFast):
    mixture = make(context_length=3000, ratio=0.0)
    for row in (mixture[index] for index in range(20)):
        last = row["document_ids"].diff() != 0
        assert torch.equal(row["input_ids"][:-1] == tokenizer.eos_token_id, last)


def test_corpus_rows_are_windows_of_the_stream(make, tokenizer, documents: tuple[Document, ...]):
    stream = token_stream(tokenizer, documents).tokens.unfold(0, LENGTH, 1)
    mixture = make(ratio=0.0)

    starts = []
    for row in (mixture[index] for index in range(30)):
        matches = (stream == row["input_ids"]).all(1).nonzero()
        assert len(matches) == 1
        starts.append(int(matches))
    assert min(starts) < len(stream) / 4
    assert max(starts) > len(stream) * 3 / 4


def test_weights_are_one_except_for_answers_and_ignored_tokens(make, tokenizer: PreTrainedTokenizerFast):
    mixture = make()
    for row in (mixture[index] for index in range(100)):
        weights, ignored = row["loss_weights"], row["labels"] == IGNORED_LABEL
        assert (weights[ignored] == 0).all()
        answers = 5 if _is_passkey(row) else 0
        expected = ANSWER_WEIGHT * answers + (LENGTH - answers - int(ignored.sum()))
        assert float(weights.sum()) == expected


def test_weighted_tokens_are_the_key_of_the_row_and_end_its_first_document(make, tokenizer: PreTrainedTokenizerFast):
    mixture = make(ratio=1.0)
    for row in (mixture[index] for index in range(50)):
        answer = (row["loss_weights"] == ANSWER_WEIGHT).nonzero().flatten()
        size = int((row["document_ids"] == 0).sum())
        assert answer.tolist() == list(range(size - 5, size))
        key = tokenizer.decode(row["input_ids"][answer])
        text = str(tokenizer.decode(row["input_ids"][:size]))
        assert f"The pass key is {key}. Remember it." in text
        assert text.endswith(f"What is the pass key? The pass key is {key}")


def test_passkey_lengths_range_from_the_minimum_to_the_row(make):
    mixture = make(ratio=1.0, minimum_length=310)
    sizes = {int((mixture[index]["document_ids"] == 0).sum()) for index in range(200)}

    assert sizes == set(range(310, LENGTH + 1))


def test_shortest_passkey_text_is_the_default_minimum(make, sentence_task: PasskeyTexts):
    mixture = make(context_length=sentence_task.minimum_length + 6, ratio=1.0, minimum_length=None)
    sizes = {int((mixture[index]["document_ids"] == 0).sum()) for index in range(50)}

    assert sizes == {sentence_task.minimum_length + 5, sentence_task.minimum_length + 6}


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_passkey_rows_have_the_stated_ratio(make, ratio: float):
    mixture = make(ratio=ratio)
    count = sum(_is_passkey(mixture[index]) for index in range(400))

    assert abs(count - 400 * ratio) <= 5 * math.sqrt(400 * ratio * (1 - ratio))


def test_rows_depend_only_on_seed_and_index(make):
    one, again = make(), make(num_rows=1000)
    backwards = {index: again[index] for index in reversed(range(30))}

    assert all(_equal(one[index], backwards[index]) for index in range(30))
    assert not _equal(one[0], one[1])
    assert not _equal(one[0], make(seed=2)[0])


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_changes_to_a_row_do_not_change_the_dataset(make, ratio: float):
    mixture = make(ratio=ratio)
    kept = {field: value.clone() for field, value in mixture[0].items()}
    for value in mixture[0].values():
        value.zero_()

    assert _equal(mixture[0], kept)


def test_workers_do_not_change_the_batches(make):
    mixture = make(num_rows=12)
    loaders = [DataLoader(mixture, batch_size=4, num_workers=n, collate_fn=collate_rows) for n in (0, 2)]
    alone, shared = (list(loader) for loader in loaders)

    assert len(alone) == 3
    assert alone[0]["input_ids"].shape == (4, LENGTH)
    assert all(_equal(first, second) for first, second in zip(alone, shared, strict=True))


def test_indices_outside_the_dataset_are_refused(make):
    mixture = make(num_rows=3)

    assert len(list(mixture)) == len(mixture) == 3
    with pytest.raises(IndexError, match="from 0 to 2; it is 3"):
        mixture[3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"context_length": 1}, "context_length must be at least 2 tokens; it is 1"),
        ({"context_length": 10**6}, "stream has .* tokens: expected at least 1000000"),
        ({"num_rows": 0}, "num_rows must be at least 1; it is 0"),
        ({"ratio": -0.1}, "ratio of passkey must be above 0 and at most 1; it is -0.1"),
        ({"ratio": 1.1}, "ratio of passkey must be above 0 and at most 1; it is 1.1"),
        ({"minimum_length": 321}, r"minimum_length of passkey must be from \d+ \(its .*\) to 320 .*; it is 321"),
        ({"minimum_length": 20}, r"minimum_length of passkey must be from \d+ \(its .*\) to 320 .*; it is 20"),
        ({"context_length": 50, "minimum_length": None}, r"context_length must be at least \d+, .*passkey.*; it is 50"),
        ({"answer_weight": 0.0}, "answer_weight of passkey must be above 0 and finite; it is 0.0"),
        ({"answer_weight": float("nan")}, "answer_weight of passkey must be above 0 and finite; it is nan"),
    ],
)
def test_invalid_arguments_are_named(make, changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        make(**changes)
