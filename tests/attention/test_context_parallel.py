"""Attention over a sequence that one group of 4 processes, or two groups of 2, share, against one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import CASES, DOUBLE

from attention_priors import Laplace, ShardedSequence, SSMax, attend, attend_across, shard_index
from attention_priors.attention.distributed import ring as context_parallel
from attention_priors.priors import Spectral2d
from processes import run_command
from thoroughness import DEEP

WORKER = Path(__file__).with_name("sharded_cases.py")
REPEATED = (
    "no prior, bidirectional, contiguous", "ggd, bidirectional", "alibi", "alibi, blocks",
    "alibi, blocks, bidirectional", "ggd and ssmax, blocks", "t5 buckets", "spectral and key sink in documents",
    "window", "ssmax", "ssmax, bidirectional", "documents", "documents, bidirectional", "documents, interleaved",
    "documents, interleaved, and a window", "padding on the left",
)  # fmt: skip
"""Cases whose parts other cases cover. They run only in a deep run."""
FOR_ALL = tuple(CASES) if DEEP else tuple(name for name in CASES if name not in REPEATED)
"""Cases that one group of four processes solves."""
FOR_PAIRS = FOR_ALL[:: 2 if DEEP else 8]
"""Cases that two groups of two processes solve as well."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each process."""
    target = tmp_path_factory.mktemp("sharded") / "found.json"
    run_command([sys.executable, WORKER, target, json.dumps({"4": FOR_ALL, "2": FOR_PAIRS})])
    return json.loads(target.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, "4") for name in (*FOR_ALL, *(f"{name}, float64" for name in DOUBLE))),
        *((name, "2") for name in FOR_PAIRS),
    ],
)
def test_shards_match_the_whole_sequence(found: list[dict[str, Any]], name: str, size: str) -> None:
    limits = {"out": 1e-5, "lse": 1e-5, "query": 1e-5, "key": 1e-5, "value": 1e-5}
    others = 1e-5
    if name.endswith("float64"):
        limits, others = dict.fromkeys(limits, 1e-10), 1e-10
    elif name == "ggd, bfloat16":
        # Results of single shards are rounded before they are merged.
        limits, others = dict.fromkeys(limits, 8e-3) | {"lse": 1e-5}, 5e-3
    elif name == "forget gate and ssmax, blocks":
        # Sums of several hundred nats, each exact to 1e-4, enter the gradients of the logit scale.
        limits, others = dict.fromkeys(limits, 5e-5), 1e-3
    elif name == "spectral and key sink, far along":
        # At position 2^19, attend() itself has an equal error against float64.
        limits, others = dict.fromkeys(limits, 1e-4), 1e-2
    for process in found:
        errors = process["errors"][f"{name} / {size}"]
        assert limits.keys() <= errors.keys()
        for part, error in errors.items():
            assert error <= limits.get(part, others), (part, error, errors)


@pytest.mark.slow
def test_two_runs_agree_bit_for_bit(found: list[dict[str, Any]]) -> None:
    assert all(process["same"] for process in found)


@pytest.mark.slow
def test_shards_are_sent_no_farther_than_their_last_reader(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["skipping"]["hops"] == {
            "causal": [3, 2, 1, 0],
            "bidirectional": [3, 3, 3, 3],
            "zigzag": [3, 3, 3, 3],
            "window": [1, 1, 1, 0],
            "window, bidirectional": [1, 3, 3, 3],  # the previous process is a full turn away
            "a document for each process": [0, 0, 0, 0],
            "padding": [0, 0, 1, 0],
        }


@pytest.mark.slow
def test_keys_of_weight_0_are_not_computed(found: list[dict[str, Any]]) -> None:
    """80 tokens in 4 runs: with a slope of 8 nats per token, only the 20 to 40 nearest keys of a query matter."""
    calls = found[0]["skipping"]["calls"]
    assert [process["flat"] for process in calls] == [1, 2, 3, 4]
    assert [process["window"] for process in calls] == [1, 2, 2, 2]
    assert [process["steep"] for process in calls] == [1, 2, 2, 2]


@pytest.mark.slow
def test_heads_skip_blocks_of_weight_0(found: list[dict[str, Any]]) -> None:
    for process in found[1:]:  # the first process sees no other process's keys
        shares = process["skipping"]["kept"]
        assert 0 < shares[0] < 0.7
        assert shares[1:] == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_wrong_kernels_of_one_process_change_the_backend_of_all(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["agreement"]
        assert {*process["agreement"]} == {"toeplitz"}


@pytest.mark.slow
def test_a_mistake_in_one_process_raises_an_error_in_all(found: list[dict[str, Any]]) -> None:
    words = {
        "a place twice": "each place from 0 to 23 must occur once",
        "one has no tokens": "index must have shape (L_r,) with at least one token",
        "documents missing in one": "document_ids must be given by all processes",
        "documents of a wrong shape": "document_ids must have shape",
        "batches of two sizes": "document_ids must have equal batch sizes",
        "positions with gaps": "positions must rise by one",
        "another head_dim in one": "must be the same in all processes of the group, got (1, 2, 4) in process 0",
        "another batch in one": "query's batch",
        "another dtype in one": "dtype must be the same",
        "causal in one": "causal must be the same",
        "a prior in one": "prior must be the same",
        "a gradient in one": "backward pass must be the same",
        "a wrong number of heads in one": "prior has num_heads=3",
        "a shard too short": "must hold the 6 tokens",
        "a wrong tolerance in one": "tolerance must be in [0, 1), got 2.0",
    }
    assert found[0]["refusals"].keys() == words.keys()
    for mistake, said in found[0]["refusals"].items():
        assert all(words[mistake] in message for message in said), said


@pytest.mark.slow
def test_a_process_that_does_not_call_raises_an_error_in_the_others(found: list[dict[str, Any]]) -> None:
    for process in found[:-1]:
        backward, call = process["silence"]["said"]
        assert "of 4 got no keys from another process" in backward
        assert "got no answer from another process of its group" in call
        assert process["silence"]["seconds"] < 30


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("length", "size"), [(8, 1), (8, 4), (61, 4), (100, 7)])
def test_layouts_hold_every_place_once(layout: Any, length: int, size: int) -> None:
    shards = [shard_index(length, rank, size, layout) for rank in range(size)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(length))
    assert max(map(len, shards)) - min(map(len, shards)) <= 2
    assert all(bool((shard[1:] > shard[:-1]).all()) for shard in shards)


def test_zigzag_balances_causal_work() -> None:
    work = [int((shard_index(800, rank, 4) + 1).sum()) for rank in range(4)]
    assert max(work) == min(work)
    work = [int((shard_index(800, rank, 4, "contiguous") + 1).sum()) for rank in range(4)]
    assert max(work) > 6.9 * min(work)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("length", (7, 0, 4)),
        ("length", (0, 0, 1)),
        ("rank", (8, 4, 4)),
        ("rank", (8, -1, 4)),
        ("layout", (8, 0, 4, "striped")),
    ],
)
def test_invalid_shards_are_refused(name: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match=name):
        shard_index(*arguments)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Create a group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_documents_and_padding_move_to_the_device_of_the_queries() -> None:
    """shard_index() returns an index on the CPU, whatever the device of the model."""
    index = shard_index(6, 0, 1)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    sequence = ShardedSequence(index, document_ids=documents, key_padding_mask=torch.arange(6).unsqueeze(0) == 1)
    call = context_parallel._Call(sequence, None, True, None, None, 0.0, "auto")
    ring = context_parallel._Ring(call, sequence.plan(True, None), keys_have_gradients=False)
    x = torch.zeros(2, 2, 6, 4, device="meta")
    owns = 0
    for piece in ring.plan.pieces[0]:
        rows = context_parallel._cut_rows(x, piece.batches, piece.rows)
        keys = context_parallel._cut_rows(x, piece.batches, piece.keys)
        geometry = ring._problem(rows, context_parallel._Shard((keys, keys)), 0, piece).geometry
        given = (
            geometry.given_query_positions,
            geometry.given_key_positions,
            geometry.query_documents,
            geometry.key_documents,
            geometry.key_padding_mask,
        )
        found = [tensor.device.type for tensor in given if tensor is not None]
        assert found == ["meta"] * len(found)
        owns += len(found) == len(given)
    assert owns, "no piece has documents and padding"


@pytest.mark.usefixtures("alone")
def test_priors_on_grids_are_refused() -> None:
    x = torch.zeros(1, 2, 6, 4)
    with pytest.raises(ValueError, match=r"must be over a line, got 'spectral_2d'"):
        attend_across(x, x, x, Spectral2d(2), sequence=ShardedSequence(shard_index(6, 0, 1)), causal=False)


@pytest.mark.cuda
@pytest.mark.usefixtures("alone")
def test_cpu_index_works_with_cuda_queries() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 40, 8, device="cuda", requires_grad=True).unbind()
    masks: dict[str, Any] = {
        "document_ids": (torch.arange(40) // 13).expand(2, -1),
        "key_padding_mask": torch.rand(2, 40) < 0.3,
    }
    sequence, scale, prior = ShardedSequence(shard_index(40, 0, 1), **masks), SSMax(2).cuda(), Laplace(2).cuda()
    found = attend_across(query, key, value, prior, sequence=sequence, logit_scale=scale)
    of_device = {name: mask.cuda() for name, mask in masks.items()}
    expected = attend(query, key, value, prior, logit_scale=scale, **of_device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
