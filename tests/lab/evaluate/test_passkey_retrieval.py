from typing import Any

import pytest
import torch
from evaluation_cases import SCHEMES, Copier, Reciter, random_text, tiny_decoder
from torch import Tensor

from attention_priors.lab.evaluate import PasskeyRow, PasskeySettings, has_given_up, passkey_rows, retrieves


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", SCHEMES)
def test_retrieving_is_what_greedy_decoding_does(name, chunk):
    for seed in range(3):
        model = tiny_decoder(seed, **SCHEMES[name])
        prompt = random_text(seed, 20)
        generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
        decoded = generate(prompt[None], max_new_tokens=5, do_sample=False)
        assert isinstance(decoded, Tensor)
        text = decoded[0]
        assert len(text) == 25
        assert retrieves(model, text, chunk=chunk)
        for digit in range(-5, 0):
            wrong = text.clone()
            wrong[digit] = (wrong[digit] + 1) % model.config.vocab_size
            assert not retrieves(model, wrong, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
def test_all_five_digits_must_be_right(chunk):
    text = torch.arange(100, 130)
    assert retrieves(Reciter(text).as_model(), text, chunk=chunk)
    for place in range(25, 30):
        assert not retrieves(Reciter(text, wrong=(place,)).as_model(), text, chunk=chunk)


def test_only_the_five_digits_count():
    text = torch.arange(100, 130)
    assert retrieves(Reciter(text, wrong=tuple(range(25))).as_model(), text, chunk=8)


def _settings(lengths: tuple[int, ...], **changes) -> PasskeySettings:
    return PasskeySettings.model_validate({"lengths": lengths, "depths": 3} | changes)


def _rows(model, task, settings: PasskeySettings, **changes) -> list[PasskeyRow]:
    return list(passkey_rows(model, task, settings, **({"chunk": 64, "seed": 0} | changes)))


def test_rows_come_depth_by_depth_and_length_by_length(short_task):
    lengths = (short_task.minimum_length + 10, short_task.minimum_length + 20)
    rows = _rows(Copier(reach=10_000).as_model(), short_task, _settings(lengths, trials=2))
    assert rows == [
        {"length": length, "depth": depth, "trials": 2, "correct": 2} for length in lengths for depth in (0.0, 0.5, 1.0)
    ]


def test_a_model_that_sees_little_finds_near_keys_alone(short_task):
    length = short_task.minimum_length + 200
    # The whole needle and question fit in the reach; half of the filler does not.
    reach = short_task.minimum_length + 50
    rows = _rows(Copier(reach).as_model(), short_task, _settings((length,), trials=2))
    assert [(row["depth"], row["correct"]) for row in rows] == [(0.0, 0), (0.5, 0), (1.0, 2)]


@pytest.fixture
def texts_read(monkeypatch) -> list[Tensor]:
    """The texts that were tested; about half of them count as right."""
    texts: list[Tensor] = []

    def retrieves(model: object, tokens: Tensor, *, chunk: int) -> bool:
        texts.append(tokens)
        return bool(int(tokens[-1]) % 2)

    monkeypatch.setattr("attention_priors.lab.evaluate.passkey.retrieves", retrieves)
    return texts


def test_an_evaluation_goes_on_where_it_stopped(short_task, texts_read):
    lengths = tuple(short_task.minimum_length + extra for extra in (0, 5, 30))
    settings = _settings(lengths, trials=4)
    whole = _rows(None, short_task, settings)
    assert len(whole) == 9
    assert len({row["correct"] for row in whole}) > 1  # else the rows could not tell texts apart
    texts = list(texts_read)
    assert len(texts) == 36
    for done in range(10):
        texts_read.clear()
        assert _rows(None, short_task, settings, done=done) == whole[done:]
        assert [text.tolist() for text in texts_read] == [text.tolist() for text in texts[4 * done :]]


def test_a_text_depends_on_its_seed_length_depth_and_trial_alone(short_task, texts_read):
    near, far = short_task.minimum_length + 10, short_task.minimum_length + 30

    def read(lengths: tuple[int, ...], **changes) -> list[list[int]]:
        texts_read.clear()
        seed = changes.pop("seed", 0)
        _rows(None, short_task, _settings(lengths, **changes), seed=seed)
        return [text.tolist() for text in texts_read]

    both = read((near, far), trials=2)
    assert [len(text) for text in both] == [near + 5] * 6 + [far + 5] * 6
    assert len({tuple(text) for text in both}) == 12
    assert len({tuple(text[-5:]) for text in both}) == 12  # pass keys of their own
    assert read((far,), trials=2) == both[6:]
    assert read((near, far), trials=1) == both[::2]
    others = read((near, far), trials=2, seed=1)
    assert not any(one == other for one, other in zip(both, others, strict=True))


def _measured(*correct: tuple[int, ...]) -> list[PasskeyRow]:
    """Rows at lengths 100, 200, ...: for each length, how many were right at each depth."""
    return [
        {"length": 100 * (index + 1), "depth": depth / 2, "trials": 4, "correct": count}
        for index, counts in enumerate(correct)
        for depth, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("rows", "after", "given_up"),
    [
        (_measured(), 1, False),
        (_measured((0, 0, 0)), 1, True),
        (_measured((0, 0, 0)), 2, False),
        (_measured((0, 0, 0), (0, 0, 0)), 2, True),
        (_measured((0, 0, 0), (0, 1, 0)), 2, False),
        (_measured((1, 0, 0), (0, 0, 0)), 2, False),
        (_measured((4, 4, 4), (0, 0, 0), (0, 0, 0)), 2, True),
        (_measured((0, 0, 0), (0, 0, 1), (0, 0, 0)), 2, False),
        (_measured((0, 0, 0), (0, 0, 0), (0, 0, 0)), None, False),
    ],
)
def test_giving_up_needs_so_many_lengths_running_without_a_success(rows, after, given_up):
    reason = has_given_up(rows, _settings((100, 200, 300, 400), stop_after_zeros=after))
    assert (reason is not None) == given_up


def test_the_reason_for_giving_up_names_the_lengths():
    reason = has_given_up(_measured((1, 1, 1), (0, 0, 0), (0, 0, 0)), _settings((100,), stop_after_zeros=2))
    assert reason == "no pass key retrieved at 2 lengths running (200, 300 tokens)"
