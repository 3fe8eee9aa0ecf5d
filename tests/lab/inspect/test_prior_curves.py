import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attention_priors import (
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    Spectral,
    SSMax,
    Uniform,
    Window,
)
from attention_priors.hf.heads import ScaleOnHeads, on_heads
from attention_priors.lab.inspect import curve_distances, logit_scale_rows, prior_rows, prior_term_rows
from attention_priors.models import PriorDecoderConfig, PriorDecoderModel
from attention_priors.priors import Axial

PRIORS: dict[str, Prior] = {
    "uniform": Uniform(3),
    "laplace": Laplace(3, learn=True),
    "generalized_gaussian": GeneralizedGaussian(3, init="linear"),
    "spectral": Spectral(3, init="recency"),
    "key_sink": KeySink(3, train_length=20, init="recency"),
    "relative_buckets": RelativeBuckets(3, init="normal"),
    "clipped_offsets": ClippedOffsets(3, init="normal"),
    "window": Window(3, size=5),
    "laplace + window": Laplace(3) + Window(3, size=5),
    "generalized_gaussian + window": GeneralizedGaussian(3, init="linear") + Window(3, size=5),
    "key_sink + laplace + spectral": KeySink(3, train_length=20) + Laplace(3) + Spectral(3, init="recency"),
}


@given(length=st.integers(1, 2_000_000))
def test_distances_run_from_zero_to_the_start_of_the_text(length):
    distances = curve_distances(length)
    assert distances[0] == 0
    assert distances[-1] == length - 1
    assert distances == sorted(set(distances))
    assert distances[:17] == list(range(min(length, 17)))
    assert len(distances) <= 160
    # Every doubling has a point, so that curves look smooth on a logarithmic axis.
    assert all(later <= 1.2 * earlier + 1 for earlier, later in pairwise(distances[1:]))


def test_distances_need_a_length():
    with pytest.raises(ValueError, match="positive number of tokens, got 0"):
        curve_distances(0)


@pytest.mark.parametrize("name", PRIORS)
def test_rows_hold_the_log_prior_of_the_last_query(name):
    rows = prior_rows([PRIORS[name]], length=60)
    assert [(row["layer"], row["head"], row["prior"]) for row in rows] == [(0, head, name) for head in range(3)]
    with torch.no_grad():
        whole = PRIORS[name].log_prior(torch.arange(60), torch.arange(60), torch.float64)
    for head, row in enumerate(rows):
        assert row["distance"] == curve_distances(60)
        for distance, value in zip(row["distance"], row["log_prior"], strict=True):
            expected = float(whole[head, 59, 59 - distance])
            assert value == (pytest.approx(expected, abs=1e-9) if math.isfinite(expected) else None)


def test_curves_of_different_heads_and_priors_differ():
    for name in ("laplace", "generalized_gaussian", "spectral", "relative_buckets", "clipped_offsets"):
        curves = [tuple(row["log_prior"]) for row in prior_rows([PRIORS[name]], length=60)]
        assert len(set(curves)) == 3, name


def test_hidden_keys_of_a_window_are_none():
    (row, *_) = prior_rows([PRIORS["laplace + window"]], length=60)
    hidden = [value is None for value in row["log_prior"]]
    assert hidden == [distance >= 5 for distance in row["distance"]]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("uniform", set()),
        ("laplace", {"slope"}),
        ("generalized_gaussian", {"alpha", "beta", "mu", "theta_alpha"}),
        ("spectral", set()),  # several numbers per head are not scalars
        ("key_sink", {"slope", "gain", "bump"}),
        ("clipped_offsets", set()),
        ("window", set()),
        ("laplace + window", {"laplace.slope"}),
        (
            "generalized_gaussian + window",
            {f"generalized_gaussian.{each}" for each in ("alpha", "beta", "mu", "theta_alpha")},
        ),
        (
            "key_sink + laplace + spectral",
            {"key_sink.slope", "key_sink.gain", "key_sink.bump", "laplace.slope"},
        ),
    ],
)
def test_scalar_parameters_per_head_are_listed(name, parameters):
    for row in prior_rows([PRIORS[name]], length=8):
        assert row["parameters"].keys() == parameters


def test_every_head_has_its_parameters():
    slopes = [row["parameters"]["slope"] for row in prior_rows([Laplace(3, slopes=[1, 0.5, 2])], length=4)]
    assert slopes == pytest.approx([1, 0.5, 2])


def test_bams_coordinates_match_its_figures():
    prior = GeneralizedGaussian(3, init="spread", keep_sign=True)
    rows = prior_rows([prior], length=4)
    for row, beta, theta_alpha in zip(rows, prior.beta.tolist(), prior.theta_alpha.tolist(), strict=True):
        assert row["parameters"]["beta"] == beta
        assert row["parameters"]["theta_alpha"] == theta_alpha
    assert rows[0]["parameters"]["beta"] == pytest.approx(-0.5)
    assert prior.theta_beta.tolist()[0] > 0  # the trained parameter is another coordinate


def test_undefined_scales_are_none():
    first, last = prior_rows([GeneralizedGaussian(2, init="linear")], length=4)
    assert first["parameters"]["beta"] == 0
    assert first["parameters"]["alpha"] is None
    assert last["parameters"]["alpha"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", PRIORS)
def test_rows_are_json_without_nan(name):
    rows = prior_rows([PRIORS[name]], length=60)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def _decoder(**scheme: Any) -> PriorDecoderModel:
    return PriorDecoderModel(
        PriorDecoderConfig(
            vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, **scheme
        )
    )


def test_every_layer_of_a_decoder_has_rows():
    model = _decoder(prior={"name": "laplace", "learn": True})
    prior = model.layers[1].get_submodule("self_attn.prior")
    assert isinstance(prior, Laplace)
    with torch.no_grad():
        prior.log_slope.add_(1.0)
    rows = prior_rows(list(model.layers), length=4)
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    before, after = rows[0]["parameters"]["slope"], rows[2]["parameters"]["slope"]
    assert before is not None
    assert after == pytest.approx(math.e * before)


def test_a_shared_prior_is_given_as_one_layer():
    model = _decoder(prior="laplace", share_prior=True)
    assert [row["layer"] for row in prior_rows([model], length=4)] == [0, 0]
    assert prior_rows(list(model.layers), length=4) == []


def test_layers_without_a_prior_have_no_rows():
    assert prior_rows(list(_decoder(encoding="rotary").layers), length=4) == []
    rows = prior_rows([nn.Linear(2, 2), Laplace(1), nn.Identity()], length=4)
    assert [row["layer"] for row in rows] == [1]


def test_logit_scales_are_listed_by_layer_and_head():
    model = _decoder(logit_scale={"name": "ssmax", "init": 0.25})
    scale = model.layers[1].get_submodule("self_attn.logit_scale")
    assert isinstance(scale, SSMax)
    with torch.no_grad():
        scale.s.copy_(torch.tensor([0.5, -1.0]))
    rows = logit_scale_rows(list(model.layers))
    assert rows == [
        {"layer": 0, "head": 0, "s": 0.25},
        {"layer": 0, "head": 1, "s": 0.25},
        {"layer": 1, "head": 0, "s": 0.5},
        {"layer": 1, "head": 1, "s": -1.0},
    ]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert logit_scale_rows(list(_decoder().layers)) == []


def test_priors_on_some_heads_have_parameters_only_there():
    inner = GeneralizedGaussian(2, init={"theta_alpha": [0.5, -1.0], "beta": [0.7, -0.2]})
    rows = prior_rows([on_heads(4, inner, [3, 1])], length=9)
    whole = prior_rows([inner], length=9)
    assert [row["head"] for row in rows] == [0, 1, 2, 3]
    for head in (0, 2):
        assert set(rows[head]["parameters"].values()) == {None}
        assert set(rows[head]["log_prior"]) == {0.0}
    for head, place in ((3, 0), (1, 1)):
        assert rows[head]["parameters"] == whole[place]["parameters"]
        assert rows[head]["log_prior"] == whole[place]["log_prior"]
    assert rows[3]["parameters"]["theta_alpha"] == 0.5
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_logit_scales_on_some_heads_are_listed():
    scale = SSMax(2)
    with torch.no_grad():
        scale.s.copy_(torch.tensor([0.25, 4.0]))
    rows = logit_scale_rows([nn.ModuleList([ScaleOnHeads(4, scale, [3, 2])])])
    assert rows == [{"layer": 0, "head": 2, "s": 4.0}, {"layer": 0, "head": 3, "s": 0.25}]


def test_summands_of_some_heads_are_0_on_the_others():
    sink = KeySink(2, train_length=9, init="recency")
    rows = prior_term_rows([on_heads(4, Laplace(2) + sink, [1, 2])], length=9)
    assert [(row["prior"], row["head"]) for row in rows] == [
        (name, head) for name in ("laplace", "key_sink") for head in range(4)
    ]
    expected = sink.log_prior_of_key(torch.arange(9), torch.float64).tolist()
    assert [row["log_prior"] for row in rows[4:]] == [[0.0] * 9, *expected, [0.0] * 9]


def test_priors_over_grids_have_no_curve_over_distance() -> None:
    layers: list[nn.Module] = [nn.ModuleList([Axial(2, "laplace")])]
    for read in (lambda: prior_rows(layers, length=9), lambda: prior_term_rows(layers, length=9)):
        with pytest.raises(ValueError, match="prior must be over a line, got 'axial'"):
            read()
