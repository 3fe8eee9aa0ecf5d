"""Weight of sinks as content grows, terms of sums of priors, and reach of priors."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attention_priors import SSMax
from attention_priors.attention.attend import attend_with_weights
from attention_priors.encodings import ShawVectors
from attention_priors.lab.inspect import (
    observed_attention,
    prior_mass_rows,
    prior_reach_rows,
    prior_rows,
    prior_term_rows,
    sink_mass,
    sink_mass_rows,
)
from attention_priors.lab.inspect.posterior import problem_logits
from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.priors import ClippedOffsets, KeySink, Laplace, Prior, Spectral, Uniform, Window

HEADS, LENGTH = 4, 12


@pytest.fixture
def content() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, LENGTH, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(2, HEADS // 2, LENGTH, 8, generator=generator, dtype=torch.float64)
    return query, key


def _goat() -> Prior:
    torch.manual_seed(1)
    spectral, sink = Spectral(HEADS), KeySink(HEADS, LENGTH)
    with torch.no_grad():
        for parameter in (spectral.alpha, spectral.beta, sink.gain, sink.bump):
            parameter.normal_()
    return spectral + sink


def _bump(size: float) -> KeySink:
    sink = KeySink(HEADS, LENGTH)
    with torch.no_grad():
        sink.bump.fill_(size)
    return sink


PRIORS = {
    "none": lambda: None,
    "uniform": lambda: Uniform(HEADS),
    "alibi": lambda: Laplace(HEADS),
    "goat": _goat,
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_without_signal_the_mass_is_the_priors_weight(content, prior):
    prior = prior()
    mass = sink_mass(*content, prior=prior, factors=[0.0])[0]
    places = torch.arange(LENGTH)
    log_prior = (
        torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64)
        if prior is None
        else prior.log_prior(places, places, torch.float64)
    )
    alone = log_prior.masked_fill(places > places[:, None], -math.inf).softmax(-1)[..., 0]
    torch.testing.assert_close(mass, alone.expand_as(mass), rtol=1e-9, atol=1e-12)


def test_mass_without_signal_matches_closed_forms(content):
    visible = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    uniform = sink_mass(*content, factors=[0])[0]
    torch.testing.assert_close(uniform, (1 / visible).expand_as(uniform))
    bump = sink_mass(*content, prior=_bump(3.0), factors=[0])[0]
    torch.testing.assert_close(bump, (math.exp(3) / (math.exp(3) + visible - 1)).expand_as(bump))


def test_mass_at_factor_one_is_the_attention_weight(content):
    query, key = content
    weights = attend_with_weights(query, key, key, _goat())[1]
    for sink in (0, 5):
        torch.testing.assert_close(sink_mass(query, key, _goat(), factors=[1.0], sink=sink)[0], weights[..., sink])
    assert (sink_mass(query, key, factors=[1.0], sink=5)[0, :, :, :5] == 0).all()


SCALES = {
    "no scale": None,
    "ssmax": SSMax(HEADS, init=2.0),
    "ssmax of the content": SSMax(HEADS, init=2.0, include_prior=False),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_goat_theorem_5_1_the_mass_stays_within_its_bounds(content, prior, scale):
    query, key = content
    factors = [0.0, 0.1, 0.5, 1.0, 3.0]
    mass = sink_mass(query, key, prior(), factors=factors, logit_scale=scale)
    visible = torch.arange(1, LENGTH + 1)
    # The range of the softmax's input: multiplied by c = 2 ln n.
    c = 1.0 if scale is None else 2 * visible.double().log().unsqueeze(-1)
    scores = c * (query @ key.repeat_interleave(2, 1).mT) / math.sqrt(8)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    ranges = scores.masked_fill(hidden, -math.inf).amax(-1) - scores.masked_fill(hidden, math.inf).amin(-1)
    for factor, there in zip(factors, mass, strict=True):
        assert (there >= mass[0] * (-factor * ranges).exp() * (1 - 1e-9)).all()
        assert (there <= mass[0] * (factor * ranges).exp() * (1 + 1e-9)).all()


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_constant_content_changes_nothing(content, prior):
    query, key = content
    mass = sink_mass(query, key[:, :, :1].expand_as(key), prior(), factors=[0.0, 1.0, 100.0])
    torch.testing.assert_close(mass, mass[:1].expand_as(mass), rtol=1e-6, atol=1e-9)


def test_content_against_a_sink_takes_all_of_its_weight():
    key = torch.zeros(1, HEADS, LENGTH, 1, dtype=torch.float64)
    key[:, :, 1] = 1.0  # one key has a signal
    query = torch.ones_like(key)
    factors = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    mass = sink_mass(query, key, _bump(5.0), factors=factors)[..., -1]
    # One key at b, one at the factor, ten at 0.
    expected = [math.exp(5) / (math.exp(5) + math.exp(factor) + LENGTH - 2) for factor in factors]
    assert mass[:, 0, 0].tolist() == pytest.approx(expected)
    assert expected == sorted(expected, reverse=True)


def test_ssmax_is_applied(content):
    query, key = content
    scale = SSMax(HEADS, init=0.7)
    mass = sink_mass(query, key, _goat(), factors=[0.0, 1.0], logit_scale=scale)
    weights = attend_with_weights(query, key, key, _goat(), logit_scale=scale)[1]
    torch.testing.assert_close(mass[1], weights[..., 0])
    assert not torch.allclose(mass[0], sink_mass(query, key, _goat(), factors=[0.0])[0])  # SSMax scales the prior too


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"factors": [1.0, -1.0]}, "factors must be finite and at least 0, got -1.0"),
        ({"factors": []}, r"factors must hold at least one number, got \[\]"),
        ({"factors": [math.inf]}, "factors must be finite and at least 0, got inf"),
        ({"factors": [1.0], "sink": 12}, "sink must be a key from 0 to 11, got 12"),
    ],
)
def test_invalid_arguments_are_refused(content, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        sink_mass(*content, **options)


def test_mass_of_a_sink_includes_shaws_vectors(content):
    query, key = content
    torch.manual_seed(0)
    relative = ShawVectors(8, 3)
    with torch.no_grad():
        for parameter in relative.parameters():
            parameter.normal_()
    found = sink_mass(query, key, factors=[0.0, 1.0], relative=relative)
    torch.testing.assert_close(found[1], attend_with_weights(query, key, key, relative=relative)[1][..., 0])
    torch.testing.assert_close(found[0, 0, 0], 1 / torch.arange(1, LENGTH + 1, dtype=torch.float64))


def test_keys_must_have_a_batch(content):
    query, key = content
    with pytest.raises(ValueError, match="key must have shape"):
        sink_mass(query, key[0], factors=[1.0])


# ---- models


def _model(**positions) -> PriorDecoderForCausalLM:
    torch.manual_seed(0)
    config = PriorDecoderConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, **positions,
    )  # fmt: skip
    return PriorDecoderForCausalLM(config).eval()


POSITIONS = {
    "none": {},
    "rope": {"encoding": "rotary"},
    "shaw": {"encoding": {"name": "shaw", "max_offset": 4}},
    "shared": {"prior": "laplace", "share_prior": True},
    "goat": {"prior": [{"name": "spectral"}, {"name": "key_sink", "train_length": 12, "init": "recency"}]},
    "ssmax": {"prior": "generalized_gaussian", "logit_scale": "ssmax"},
}


def _range(model, texts: list[Tensor], layer: int, head: int) -> float:
    """Return the mean range of the content logits, scaled as in the softmax."""
    seen: list[Tensor] = []

    def see(one) -> None:
        if one.index % 2 == layer:
            logits = problem_logits(one.problem)
            shown = logits.content[0, head].masked_fill(~logits.visible[0, head], math.nan)[1:].double().numpy()
            seen.append(torch.from_numpy(np.nanmax(shown, -1) - np.nanmin(shown, -1)))

    with torch.no_grad():
        for text in texts:
            with observed_attention(model, see):
                model(text[None])
    return float(torch.cat(seen).mean())


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_rows_at_factor_one_match_the_models_attention(positions):
    model = _model(**positions)
    texts = [torch.randint(20, (12,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    rows = sink_mass_rows(model, texts, factors=[0.0, 1.0])
    assert [(row["layer"], row["head"], row["factor"]) for row in rows] == [
        (layer, head, factor) for layer in range(2) for head in range(4) for factor in (0.0, 1.0)
    ]
    with torch.no_grad():
        weights = [model(text[None], output_attentions=True).attentions for text in texts]
    for row in rows:
        own = torch.cat([layers[row["layer"]][0, row["head"], 1:, 0] for layers in weights])
        if row["factor"] == 1:
            assert row["mass"] == pytest.approx(float(own.mean()), rel=1e-5)
            assert row["signal"] == pytest.approx(_range(model, texts, row["layer"], row["head"]), rel=1e-5)
        else:
            assert row["signal"] == 0


def test_rows_refuse_texts_that_are_too_short():
    with pytest.raises(ValueError, match=r"texts must hold texts of at least 2 tokens each, got lengths \[1\]"):
        sink_mass_rows(_model(), [torch.tensor([1])], factors=[1.0])
    with pytest.raises(ValueError, match=r"got lengths \[\]"):
        sink_mass_rows(_model(), [], factors=[1.0])


# ---- terms of priors


def test_terms_add_up_to_the_prior():
    prior = _goat()
    rows = prior_term_rows([nn.ModuleList([prior])], length=LENGTH)
    assert [(row["prior"], row["over"], row["head"]) for row in rows] == [
        (name, over, head) for name, over in (("spectral", "distance"), ("key_sink", "key")) for head in range(HEADS)
    ]
    places = torch.arange(LENGTH)
    whole = prior.log_prior(places, places, torch.float64).detach()
    for head in range(HEADS):
        relative, sink = (torch.tensor(row["log_prior"]) for row in rows if row["head"] == head)
        for query, key in ((0, 0), (7, 3), (11, 0), (11, 11)):
            assert float(relative[query - key] + sink[key]) == pytest.approx(float(whole[head, query, key]), abs=1e-4)
        ahead, none = (row["ahead"] for row in rows if row["head"] == head)
        assert none is None
        assert ahead is not None
        for query, key in ((0, 0), (3, 7), (0, 11)):
            value = torch.tensor(ahead[key - query]) + sink[key]
            assert float(value) == pytest.approx(float(whole[head, query, key]), abs=1e-4)


def test_terms_of_sums_and_tables_with_windows():
    assert prior_term_rows([nn.ModuleList([Laplace(2)]), nn.Linear(1, 1)], length=8) == []
    table = ClippedOffsets(2, max_offset=3)
    with torch.no_grad():
        table.bias.copy_(torch.arange(14.0).view(2, 7))
    for prior in (table, Spectral(2, num_frequencies=2)):
        places = torch.arange(8)
        whole = prior.log_prior(places, places, torch.float64).detach()
        rows = prior_term_rows([nn.ModuleList([prior])], length=8)
        assert [(row["prior"], row["over"], row["head"]) for row in rows] == [
            (prior.name, "distance", h) for h in (0, 1)
        ]
        for row in rows:
            assert row["log_prior"] == pytest.approx(whole[row["head"], -1].flip(0).tolist())
            assert row["ahead"] == pytest.approx(whole[row["head"], 0].tolist())
    rows = prior_term_rows([nn.ModuleList([Laplace(2) + Window(2, 3)])], length=8)
    assert rows[2]["prior"] == "window"
    assert rows[2]["log_prior"] == [0.0, 0.0, 0.0, None, None, None, None, None]


def test_masses_of_known_priors_match():
    uniform, bump = (prior_mass_rows([nn.ModuleList([prior])], length=4)[0] for prior in (Uniform(2), _bump(40.0)))
    mean = (1 / 3 + 1 / 4) / 2  # of queries 2 and 3
    same = dict.fromkeys(("first", "previous", "itself"), pytest.approx(mean))
    assert uniform == {"layer": 0, "head": 0, **same, "scaled": False}
    assert bump["first"] == pytest.approx(1.0)
    steep = prior_mass_rows([nn.ModuleList([Laplace(1, slopes=[math.log(2)])])], length=3)[0]
    assert (steep["itself"], steep["previous"], steep["first"]) == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    with pytest.raises(ValueError, match="length must be at least 3 tokens, got 2"):
        prior_mass_rows([], length=2)


def test_a_sum_has_one_curve_among_the_priors():
    (row, *_) = prior_rows([nn.ModuleList([_goat()])], length=LENGTH)
    assert row["prior"] == "spectral + key_sink"


def test_the_mass_of_a_sink_is_differentiable(content):
    query, key = (x.requires_grad_() for x in content)
    prior = _bump(1.0)
    sink_mass(query, key, prior, factors=[0.0, 1.0])[1].sum().backward()
    for x in (query.grad, key.grad, prior.bump.grad):
        assert x is not None
        assert float(x.abs().max()) > 1e-3


def _without_content(prior: Prior, scale: SSMax, length: int) -> Tensor:
    """Return the attention weights of zero queries, ``(H, L, L)``."""
    nothing = torch.zeros(1, HEADS, length, 4, dtype=torch.float64)
    return attend_with_weights(nothing, nothing, nothing, prior, logit_scale=scale)[1][0].detach()


@pytest.mark.parametrize("include_prior", [True, False])
def test_masses_describe_the_applied_prior(include_prior):
    prior, scale = _goat(), SSMax(HEADS, init=0.8, include_prior=include_prior)
    weights = _without_content(prior, scale, LENGTH)
    rows = prior_mass_rows([nn.ModuleList([prior, scale])], length=LENGTH)
    assert [row["scaled"] for row in rows] == [include_prior] * HEADS
    for row in rows:
        mine = weights[row["head"], 2:]
        assert row["first"] == pytest.approx(float(mine[:, 0].mean()), rel=1e-9)
        assert row["previous"] == pytest.approx(float(mine.diagonal(1).mean()), rel=1e-9)
        assert row["itself"] == pytest.approx(float(mine.diagonal(2).mean()), rel=1e-9)
    terms = prior_term_rows([nn.ModuleList([prior, scale])], length=LENGTH)
    expected = (0.8 * torch.arange(1, LENGTH + 1).double().log()).tolist()
    for row in terms:
        assert row["scale"] == (pytest.approx(expected) if include_prior else None)


def test_masses_of_texts_longer_than_a_block_match(monkeypatch: pytest.MonkeyPatch):
    from attention_priors.lab.inspect import priors as terms

    whole = prior_mass_rows([nn.ModuleList([Laplace(2)])], length=12)
    monkeypatch.setattr(terms, "_QUERIES_AT_A_TIME", 4)
    for found, expected in zip(prior_mass_rows([nn.ModuleList([Laplace(2)])], length=12), whole, strict=True):
        for name in ("first", "previous", "itself"):
            assert found[name] == pytest.approx(expected[name], rel=1e-12)


def test_summands_have_the_logit_scale_of_their_head():
    scale = SSMax(3)
    with torch.no_grad():
        scale.s.copy_(torch.tensor([0.1, 1.0, -0.5]))
    for row in prior_term_rows([nn.ModuleList([Laplace(3) + Uniform(3), scale])], length=6):
        expected = scale.s[row["head"]].item() * torch.arange(1, 7, dtype=torch.float64).log()
        assert row["scale"] == pytest.approx(expected.tolist(), rel=1e-6)


def test_given_logit_scales_are_used():
    prior, scale = Laplace(2) + Uniform(2), SSMax(2, init=0.5)
    rows = prior_term_rows([prior], length=4, logit_scales=[scale])
    assert rows[0]["scale"] == pytest.approx([0.5 * math.log(n) for n in range(1, 5)], rel=1e-6)


def test_a_shared_prior_is_scaled_in_each_layer():
    prior = Laplace(HEADS)
    scales = [SSMax(HEADS, init=init) for init in (0.5, 2.0)]
    rows = prior_mass_rows([nn.ModuleList([prior, *scales])], length=LENGTH)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (0, 1) for head in range(HEADS)]
    for layer, scale in enumerate(scales):
        alone = prior_mass_rows([nn.ModuleList([prior, scale])], length=LENGTH)
        assert [row | {"layer": 0} for row in rows if row["layer"] == layer] == alone


@pytest.mark.parametrize("include_prior", [True, False])
def test_reaches_hold_half_of_the_applied_prior(include_prior):
    prior, scale = _goat(), SSMax(HEADS, init=0.8, include_prior=include_prior)
    rows = prior_reach_rows([nn.ModuleList([prior, scale])], lengths=[LENGTH, 1, 5])
    assert [(row["layer"], row["head"]) for row in rows] == [(0, head) for head in range(HEADS)]
    for row in rows:
        assert list(row["half"]) == ["1", "5", str(LENGTH)]
        for size, half in row["half"].items():
            from_the_last = _without_content(prior, scale, int(size))[row["head"], -1].flip(0).cumsum(0)
            assert float(from_the_last[half]) >= 0.5 - 1e-9
            assert half == 0 or float(from_the_last[half - 1]) < 0.5 + 1e-9
    scales = [SSMax(HEADS, init=init) for init in (0.5, 2.0)]
    shared = prior_reach_rows([nn.ModuleList([Laplace(HEADS), *scales])], lengths=[LENGTH])
    assert [row["layer"] for row in shared] == [0] * HEADS + [1] * HEADS
    assert shared[0]["half"][str(LENGTH)] > shared[HEADS]["half"][str(LENGTH)]  # steeper where the scale is larger
