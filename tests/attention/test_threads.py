"""Parts of large problems on separate threads give the numbers of a single thread, bit for bit."""

import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from attention_priors import Fire, GeneralizedGaussian, Laplace, Prior, SSMax, attend
from attention_priors.attention.tiles import backward, forward, plain_backward, threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def numbers(on_threads: int, prior: Prior | None = None, **options: Any) -> list[Tensor]:
    """Return output and gradients of a problem that is divided as a large one, computed on one thread or several."""
    torch.set_num_threads(on_threads)
    generator = torch.Generator().manual_seed(0)
    heads = 4 if prior is None else prior.num_heads
    query = torch.randn(2, heads, 1100, 16, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, 2, 1100, 16, generator=generator, requires_grad=True) for _ in range(2))
    prior = GeneralizedGaussian(4, init="spread") if prior is None else prior
    with (
        mock.patch.object(forward, "PAIRS", 0),
        mock.patch.object(backward, "PAIRS", 0),
        mock.patch.object(plain_backward, "PAIRS", 0),
        mock.patch.object(threads, "_do", wraps=threads._do) as done,
    ):
        out = attend(query, key, value, prior, **options)
        learned = [parameter for parameter in prior.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(out.square().sum(), [query, key, value, *learned])
    assert done.called is (on_threads > 1)
    return [out, *grads]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_scale": SSMax(4, init=0.2)},
        {"tolerance": 1e-4},
        {"key_padding_mask": torch.arange(1100) % 7 == 3},
        {"prior": Laplace(4, slopes=[0.01] * 4)},
        {"prior": Fire(8, init={"threshold": 100.0})},
        {"key_bias": (torch.arange(1100.0) * torch.tensor([1.0, 0.001, 1e-6, 1e-6])[:, None]).repeat(2, 1, 1)},
    ],
    ids=["table", "scaled", "pruned", "padded", "plain", "network", "steep"],
)
def test_threads_give_bitwise_equal_results(options: dict[str, Any]) -> None:
    if "key_padding_mask" in options:
        options = {"key_padding_mask": options["key_padding_mask"].expand(2, -1)}
    for alone, shared in zip(numbers(1, **options), numbers(2, **options), strict=True):
        assert torch.equal(alone, shared)


def shared(pieces: list[Any]) -> None:
    threads.share(pieces, lambda: None, at_once=True)


def test_every_piece_runs_once_on_its_own_core() -> None:
    seen: list[tuple[int, int, bool]] = []

    def piece(number: int) -> Any:
        return lambda workspace: seen.append((number, torch.get_num_threads(), torch.is_grad_enabled()))

    shared([piece(number) for number in range(50)])
    assert sorted(seen) == [(number, 1, False) for number in range(50)]
    assert torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


def test_an_error_reaches_the_caller() -> None:
    def fail(workspace: None) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shared([fail, fail, fail, fail])
    shared([lambda workspace: None] * 4)


def test_threads_inherit_inference_mode() -> None:
    with torch.inference_mode():
        out = torch.zeros(2)
        shared([lambda workspace: out[:1].add_(1), lambda workspace: out[1:].add_(1)])
    assert out.tolist() == [1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process")
def test_a_forked_process_has_its_own_threads() -> None:
    shared([lambda workspace: None] * 2)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        shared([lambda workspace: done.append(1), lambda workspace: done.append(1)])
        os._exit(0 if done == [1, 1] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_few_pieces_run_one_after_another_on_all_cores() -> None:
    busy = [pieces for pieces in range(1, 13) if threads.keep_busy(pieces, 2)]
    assert busy == [2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [pieces for pieces in range(1, 13) if threads.keep_busy(pieces, 4)] == [4, 7, 8, 10, 11, 12]
    assert not threads.keep_busy(8, 1)
    seen: list[int] = []
    shared([lambda workspace: seen.append(torch.get_num_threads())] * 3)
    assert seen == [2, 2, 2]
