"""Greedy answers against transformers' ``generate``."""

from itertools import product
from pathlib import Path
from typing import Any

import model_folders
import pytest
import torch

from attention_priors.lab.tasks import Subject
from attention_priors.lab.tasks.generation import continue_texts, forced_predictions
from attention_priors.lab.tasks.retrieval import text_seed

KINDS = pytest.mark.parametrize("kind", model_folders.KINDS)
NEW = 12


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Any]:
    # Float64, so that rounding cannot make two tokens equally likely.
    return {kind: Subject.load(folders[kind]).model.double() for kind in model_folders.KINDS}


def _prompts(batch: int, length: int = 40) -> torch.Tensor:
    return torch.randint(1, 400, (batch, length), generator=torch.Generator().manual_seed(batch))


def _generated(model: Any, prompts: torch.Tensor, **options: Any) -> list[list[int]]:
    mask = torch.ones_like(prompts)
    found = model.generate(prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return found[:, prompts.shape[1] :].tolist()


@KINDS
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_greedy_answers_match_generate(models: dict[str, Any], kind: str, chunk: int):
    for batch in (1, 3):
        expected = _generated(models[kind], _prompts(batch), eos_token_id=None)
        assert continue_texts(models[kind], _prompts(batch), NEW, chunk=chunk) == expected
        assert continue_texts(models[kind], _prompts(batch), 1, chunk=chunk) == [row[:1] for row in expected]


@KINDS
def test_texts_end_before_the_end_token(models: dict[str, Any], kind: str):
    prompts = _prompts(3)
    free = continue_texts(models[kind], prompts, NEW, chunk=16)
    stop = {free[0][4], free[1][0]}
    ends = [next((place for place, token in enumerate(row) if token in stop), NEW) for row in free]
    assert ends[1] == 0
    found = continue_texts(models[kind], prompts, NEW, chunk=16, stop=stop)
    assert found == [row[:end] for row, end in zip(free, ends, strict=True)]
    generated = _generated(models[kind], prompts, eos_token_id=sorted(stop), pad_token_id=0)
    assert [row[:end] for row, end in zip(generated, ends, strict=True)] == found


def test_logits_that_are_not_finite_give_no_answer(folders: dict[str, Path]):
    model: Any = Subject.load(folders["llama"]).model
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    prompts = _prompts(2)
    for answer in (
        lambda: continue_texts(model, prompts, 3, chunk=16),
        lambda: forced_predictions(model, prompts, prompts, chunk=16),
    ):
        with pytest.raises(ValueError, match=r"must give finite logits; in torch.float32 it gives \["):
            answer()


def test_generation_stops_when_all_texts_have_ended(models: dict[str, Any]):
    model, prompts = models["llama"], _prompts(2)
    first = {row[0] for row in continue_texts(model, prompts, 1, chunk=64)}
    passes: list[int] = []
    handle = model.register_forward_hook(lambda *args: passes.append(1))
    assert continue_texts(model, prompts, NEW, chunk=64, stop=first) == [[], []]
    handle.remove()
    assert len(passes) == 2  # all tokens of the prompts but the last, and the last


@KINDS
def test_forced_predictions_match_greedy_decoding(models: dict[str, Any], kind: str):
    prompts = _prompts(3)
    free = torch.tensor(continue_texts(models[kind], prompts, 5, chunk=16))
    for chunk in (1, 3, 64):
        assert torch.equal(forced_predictions(models[kind], prompts, free, chunk=chunk)[0], free)
    wrong = free.clone()
    wrong[1, 2] = (wrong[1, 2] + 1) % 400
    found, margins = forced_predictions(models[kind], prompts, wrong, chunk=16)
    assert (found == wrong).all(1).tolist() == [True, False, True]
    assert (found == wrong)[1, :2].all()
    assert not (found == wrong)[1, 2]
    # After a wrong token, the next tokens may differ from greedy decoding: each prediction follows the given tokens.
    with torch.no_grad():
        logits = models[kind](torch.cat([prompts, wrong], dim=1)).logits[:, 39:-1]
    assert torch.equal(found, logits.argmax(-1))
    assert torch.equal(found == wrong, margins > 0)
    for text, place in product(range(3), range(5)):
        true = int(wrong[text, place])
        others = torch.cat([logits[text, place, :true], logits[text, place, true + 1 :]])
        assert float(margins[text, place]) == pytest.approx(float(logits[text, place, true] - others.max()), abs=1e-4)


def test_seeds_of_questions_are_distinct_and_spread():
    places = [
        (seed, length, depth, trial)
        for seed in (0, 1)
        for length in (64, 128)
        for depth in range(20)
        for trial in (0, 1)
    ]
    seeds = [text_seed("hashed", *place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert min(seeds) < 2**28 < 2**31 < max(seeds)
    # Published texts never change.
    assert text_seed("hashed", 0, 1024, 3, 0) == 2333925526
