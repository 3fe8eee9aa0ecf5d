"""Every way computes its stated function."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import LINE_WAYS, WAYS, case
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from attention_priors import Laplace, Prior, Spectral, attend
from attention_priors.lab.bench import peers
from attention_priors.lab.bench.measure import error_of
from attention_priors.lab.bench.way import CannotRunError, Case, Pass, make_inputs
from processes import fork, join

PACKAGE_OF = {
    "x-transformers": "x_transformers",
    "x-transformers-flash": "x_transformers",
    "goat": "goat",
    "goat-default": "goat",
}
COMPILED = {"flex-alibi", "flex-ggd"}


def skip_what_is_missing(name: str) -> None:
    package = PACKAGE_OF.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def run(name: str, case: Case) -> tuple[Tensor, float]:
    prepared = WAYS[name].prepare(case, make_inputs(case))
    with torch.no_grad():
        out = prepared.run()
    assert tuple(out.shape) == prepared.shape
    return out, error_of(case, prepared, out)


@pytest.mark.parametrize("passing", ["forward", "decode"])
@pytest.mark.parametrize("name", [name for name in LINE_WAYS if name not in COMPILED])
def test_outputs_match_the_reference(name: str, passing: Pass):
    skip_what_is_missing(name)
    for length in (16, 45):
        _, error = run(name, case(passing, length, batch=2))
        assert error < 3e-6


GRID_WAYS = [name for name in WAYS if name.startswith("grid-")]


@pytest.mark.parametrize("name", GRID_WAYS)
def test_outputs_over_grids_match_the_reference(name: str):
    for length in (16, 49):
        _, error = run(name, case("forward", length, batch=2))
        assert error < 3e-6


@pytest.mark.parametrize("name", GRID_WAYS)
def test_grids_must_be_square_and_cannot_decode(name: str):
    for this in (case("decode", 16), case("forward", 20)):
        with pytest.raises(CannotRunError, match=r"decode|20 patches do not form a square grid"):
            WAYS[name].prepare(this, make_inputs(this))


def test_gradients_over_grids_match_the_dense_bias():
    this = case("forward+backward", 25)
    inputs = make_inputs(this)
    weights = torch.randn(this.batch, this.heads, 25, this.head_dim, generator=torch.Generator().manual_seed(1))
    ours, dense = (WAYS[name].prepare(this, inputs) for name in ("grid-ggd", "grid-bias-ggd"))
    found, expected = (torch.autograd.grad(one.run(), one.leaves, weights) for one in (ours, dense))
    assert len(found) == 3 + 6
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5)


def test_flex_attention_matches_the_reference(monkeypatch: pytest.MonkeyPatch):
    """Tests the score of a learned table, whose offset may be wrong. Uncompiled: compilation takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    _, error = run("flex-ggd", case("forward", 130))
    assert error < 3e-6


def test_causal_blocks_match_flex_attentions():
    for length in (1, 128, 300):
        made = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
        assert torch.equal(peers.causal_blocks(length, "cpu").to_dense(), made.to_dense())


@pytest.mark.parametrize("passing", ["forward", "decode"])
def test_other_functions_are_detected(passing: Pass):
    """Slightly different priors, or a missing mask, give errors far above rounding."""
    this = case(passing)
    inputs = make_inputs(this)
    prepared = WAYS["attend-alibi"].prepare(this, inputs)
    with torch.no_grad():
        steeper = attend(inputs.query, inputs.key, inputs.value, Laplace(2, slopes=[0.07, 0.004]))
    assert error_of(this, prepared, steeper) > 1e-3
    assert error_of(this, prepared, torch.full_like(steeper, torch.nan)) == torch.inf


def heads_first(case: Case, gradient: Tensor) -> Tensor:
    return gradient if gradient.dim() == 4 else gradient.unflatten(-1, (case.heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    "name", [name for name in LINE_WAYS if WAYS[name].counterpart is not None and name not in COMPILED]
)
def test_gradients_match_the_reference(name: str):
    skip_what_is_missing(name)
    this = case("forward+backward", 29)
    inputs = make_inputs(this)
    prepared = WAYS[name].prepare(this, inputs)
    out = prepared.run()
    weights = torch.randn(
        this.batch, this.heads, this.length, this.head_dim, generator=torch.Generator().manual_seed(1)
    )
    flat = weights if out.dim() == 4 else weights.transpose(1, 2).flatten(2)
    found = torch.autograd.grad(out, prepared.leaves, flat)

    options: dict[str, Any] = {"backend": "reference"}
    tensors = [x.detach().double().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    query, key, value = tensors
    prior = None
    if name.startswith("goat"):
        content = peers.goat_content(this)
        module: Any = free_variable(prepared.run, torch.nn.Module)
        prior = free_variable(prepared.expected.__wrapped__, Prior)  # pyright: ignore[reportFunctionMemberAccess]
        (alpha,) = (term.alpha for term in prior.terms() if isinstance(term, Spectral))
        query, key = query[..., :content], key[..., :content]
        expected = torch.autograd.grad(attend(query, key, value, prior, **options), [*tensors, alpha], weights)
        found_alpha = next(g for leaf, g in zip(prepared.leaves, found, strict=True) if leaf is module.lambda_sym)
        found = (*found[:3], found_alpha)
    else:
        counterpart = WAYS[WAYS[name].counterpart or ""]
        theirs = counterpart.prepare(this, inputs)
        assert theirs.leaves[:3] == (inputs.query, inputs.key, inputs.value)
        expected = torch.autograd.grad(theirs.run(), theirs.leaves, weights)
    if name == "bloom":
        (fused,) = found
        found = tuple(fused.unflatten(-1, (this.heads, 3, -1)).transpose(1, 2).unbind(3))
    assert len(found) == len(expected)
    for mine, reference in zip(found, expected, strict=True):
        mine = heads_first(this, mine) if reference.dim() == 4 else mine
        torch.testing.assert_close(mine.double(), reference.double(), rtol=2e-4, atol=2e-5)


def free_variable(function: Any, kind: type[Any]) -> Any:
    return next(cell.cell_contents for cell in function.__closure__ if isinstance(cell.cell_contents, kind))


def test_every_way_has_a_description_and_valid_references():
    labels = [way.label for way in WAYS.values()]
    assert len(set(labels)) == len(labels)
    for name, way in WAYS.items():
        assert way.name == name
        assert way.times
        assert WAYS[way.baseline].kind == "limit"
        assert way.counterpart is None or (WAYS[way.counterpart].kind, way.kind) == ("ours", "others")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot copy a process")
def test_peers_are_imported_on_demand(tmp_path: Path):
    peers = {"x_transformers", "goat"}

    def import_anew() -> None:
        for name in [name for name in sys.modules if name in peers or name.startswith("attention_priors.lab.bench")]:
            del sys.modules[name]
        importlib.import_module("attention_priors.lab.bench")
        assert not peers.intersection(sys.modules)

    join(fork(import_anew, tmp_path / "printed"), tmp_path / "printed")
