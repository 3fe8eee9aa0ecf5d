"""``PriorAttention`` equals ``nn.MultiheadAttention``, and with a prior the dense formula."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attention_priors import GeneralizedGaussian, KeySink, Laplace, Prior, PriorAttention, SSMax, Uniform, Window
from attention_priors.priors import CATALOGUE
from thoroughness import examples

EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 7


def catalogue_prior(name: str, heads: int = HEADS) -> Prior:
    prior = CATALOGUE[name].examples(heads)[0]
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
        if isinstance(prior, KeySink):
            prior.slope.zero_()  # it has a meaning without a causal mask
    return prior


def pair(prior: Prior | None = None, **options: Any) -> tuple[nn.MultiheadAttention, PriorAttention]:
    """Return both classes with equal weights, biases included."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    ours = PriorAttention(EMBED, HEADS, dtype=torch.float64, prior=prior, **options)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("prior.") for name in missing)
    return theirs.eval(), ours.eval()


def inputs(kdim: int = EMBED, vdim: int = EMBED, *, batch_first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    made = (
        torch.randn(BATCH, length, width, dtype=torch.float64)
        for length, width in ((QUERIES, EMBED), (KEYS, kdim), (KEYS, vdim))
    )
    query, key, value = (x if batch_first else x.transpose(0, 1) for x in made)
    return query, key, value


def assert_same(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    assert found[0].shape == expected[0].shape
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
    assert (found[1] is None) == (expected[1] is None)
    if found[1] is not None and expected[1] is not None:
        assert found[1].shape == expected[1].shape
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    flat = torch.rand(QUERIES, KEYS, generator=generator) < 0.4
    deep = torch.rand(BATCH * HEADS, QUERIES, KEYS, generator=generator) < 0.4
    flat[:, 0] = deep[:, :, 0] = False  # every query sees a key: otherwise, nn.MultiheadAttention returns nan
    added = torch.randn(QUERIES, KEYS, generator=generator, dtype=torch.float64)
    deeply = torch.randn(BATCH * HEADS, QUERIES, KEYS, generator=generator, dtype=torch.float64)
    return {
        "boolean, flat": flat,
        "boolean, per head": deep,
        "float, flat": added,
        "float, per head": deeply,
        "float with -inf": added.masked_fill(flat, float("-inf")),
    }


def paddings() -> dict[str, Tensor]:
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, 5:] = True
    padding[1, 2] = True
    added = torch.linspace(-2, 2, BATCH * KEYS, dtype=torch.float64).view(BATCH, KEYS)
    return {"boolean": padding, "float": added, "float with -inf": added.masked_fill(padding, float("-inf"))}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 8}, {"vdim": 3}])
def test_outputs_match_multihead_attention(
    uniform: bool, need_weights: bool, average: bool, batch_first: bool, bias: bool, widths: dict[str, int]
) -> None:
    prior = Uniform(HEADS) if uniform else None
    theirs, ours = pair(prior, batch_first=batch_first, bias=bias, **widths)
    x = inputs(**widths, batch_first=batch_first)
    flags = {"need_weights": need_weights, "average_attn_weights": average}
    assert_same(ours(*x, **flags), theirs(*x, **flags))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, *masks()])
@pytest.mark.parametrize("padding", [None, *paddings()])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks_match_multihead_attention(mask: str | None, padding: str | None, need_weights: bool) -> None:
    theirs, ours = pair()
    x = inputs()
    attn_mask = None if mask is None else masks()[mask]
    key_padding_mask = None if padding is None else paddings()[padding]
    found = ours(*x, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask)
    if attn_mask is not None and key_padding_mask is not None and attn_mask.dtype != key_padding_mask.dtype:
        # nn.MultiheadAttention combines masks of one kind only, so it gets float masks.
        attn_mask, key_padding_mask = (
            torch.zeros(m.shape, dtype=torch.float64).masked_fill(m, float("-inf")) if m.dtype == torch.bool else m
            for m in (attn_mask, key_padding_mask)
        )
    expected = theirs(*x, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask)
    assert_same(found, expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padding", [None, "boolean", "float"])
def test_unbatched_sequences_match(padding: str | None, need_weights: bool) -> None:
    theirs, ours = pair()
    query, key, value = (x[:, 0] for x in inputs())
    mask = None if padding is None else paddings()[padding][0]
    flags = {"key_padding_mask": mask, "need_weights": need_weights}
    found = ours(query, key, value, **flags)
    assert found[0].shape == (QUERIES, EMBED)
    assert_same(found, theirs(query, key, value, **flags))


def test_unbatched_sequences_may_have_a_mask_per_head() -> None:
    theirs, ours = pair()
    query, key, value = (x[:, 0] for x in inputs())
    mask = masks()["boolean, per head"][:HEADS]
    assert_same(ours(query, key, value, attn_mask=mask), theirs(query, key, value, attn_mask=mask))


@pytest.mark.parametrize("need_weights", [True, False])
def test_gradients_match_multihead_attention(need_weights: bool) -> None:
    theirs, ours = pair()
    x = inputs()
    cotangent = torch.randn(QUERIES, BATCH, EMBED, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(m(*x, need_weights=need_weights)[0], list(m.parameters()), cotangent)
        for m in (ours, theirs)
    )
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("training", [False, True])
def test_pytorchs_encoder_layer_applies_the_prior(training: bool) -> None:
    """The encoder layer's fast path for evaluation would read the weights and ignore the prior."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    plain = layer.self_attn
    layer.self_attn = PriorAttention(32, 4, batch_first=True, prior=Laplace(4))  # pyright: ignore[reportAttributeAccessIssue]
    layer.self_attn.load_state_dict(plain.state_dict(), strict=False)
    layer.train(training)
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        found = layer(x)
        hidden = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        expected = layer.norm2(hidden + layer.linear2(torch.relu(layer.linear1(hidden))))
    torch.testing.assert_close(found, expected)


def test_state_dicts_are_exchangeable() -> None:
    choices: list[dict[str, Any]] = [{}, {"bias": False}, {"kdim": 4, "vdim": 6}]
    for options in choices:
        theirs, ours = nn.MultiheadAttention(EMBED, HEADS, **options), PriorAttention(EMBED, HEADS, **options)
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}


def test_initialisation_matches_multihead_attention() -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(EMBED, HEADS)
    ours = PriorAttention(EMBED, HEADS)
    limit = (6 / (EMBED + 3 * EMBED)) ** 0.5
    for module in (theirs, ours):
        assert float(module.in_proj_weight.detach().abs().max()) <= limit  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert float(module.in_proj_weight.detach().abs().max()) > 0.8 * limit  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert not module.in_proj_bias.any()  # pyright: ignore[reportOptionalMemberAccess]
        assert not module.out_proj.bias.any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_applies_in_training_only(need_weights: bool) -> None:
    ours = PriorAttention(EMBED, HEADS, dropout=0.5, batch_first=True, prior=Laplace(HEADS))
    x = torch.randn(BATCH, QUERIES, EMBED)
    torch.manual_seed(0)
    first, weights = ours(x, x, x, need_weights=need_weights, is_causal=True)
    torch.manual_seed(0)
    again, _ = ours(x, x, x, need_weights=need_weights, is_causal=True)
    other, _ = ours(x, x, x, need_weights=need_weights, is_causal=True)
    assert first.shape == (BATCH, QUERIES, EMBED)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    if need_weights:  # weights before dropout
        torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, QUERIES))
    ours.eval()
    assert torch.equal(ours(x, x, x, need_weights=need_weights)[0], ours(x, x, x, need_weights=need_weights)[0])


# ---- with a prior


def expected_weights(
    module: PriorAttention, query: Tensor, key: Tensor, causal: bool, padding: Tensor | None = None
) -> Tensor:
    """Compute the weights ``(B, H, Lq, Lk)`` from the projections and the log-prior."""
    kv_width = module.head_dim * module.num_kv_heads
    q = query @ module.in_proj_weight[:EMBED].T
    k = key @ module.in_proj_weight[EMBED : EMBED + kv_width].T
    if module.in_proj_bias is not None:
        q, k = q + module.in_proj_bias[:EMBED], k + module.in_proj_bias[EMBED : EMBED + kv_width]
    q, k = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(module.num_heads // module.num_kv_heads, 1)
    query_positions = torch.arange(query.shape[1]) + key.shape[1] - query.shape[1]
    key_positions = torch.arange(key.shape[1])
    logits = q @ k.mT / module.head_dim**0.5
    visible = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
    if causal:
        visible = query_positions[:, None] >= key_positions
    visible = visible.expand(len(query), 1, -1, -1)
    if padding is not None:
        visible = visible & ~padding[:, None, None]
    if module.prior is not None:
        logits = logits + module.prior.log_prior(query_positions, key_positions, torch.float64)
    if module.logit_scale is not None:
        scale = module.logit_scale.s.double()[:, None, None] * visible.sum(-1, keepdim=True).double().log()
        logits = logits * scale
    return logits.masked_fill(~visible, float("-inf")).softmax(-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [name for name, prior in CATALOGUE.items() if not prior.over_grid])
def test_weights_match_the_dense_formula(name: str, causal: bool) -> None:
    _, ours = pair(catalogue_prior(name), batch_first=True)
    query, key, value = inputs(batch_first=True)
    wanted = expected_weights(ours, query, key, causal)
    out, weights = ours(query, key, value, average_attn_weights=False, is_causal=causal)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-9)
    _, averaged = ours(query, key, value, is_causal=causal)
    torch.testing.assert_close(averaged, wanted.mean(1), rtol=1e-6, atol=1e-9)
    fast, nothing = ours(query, key, value, need_weights=False, is_causal=causal)
    assert nothing is None
    torch.testing.assert_close(fast, out, rtol=1e-6, atol=1e-9)
    if name != "uniform":
        ours.prior = None
        assert ((ours(query, key, value, is_causal=causal)[0] - out).abs() > 1e-4).any()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_queries_match_the_dense_formula(kv_heads: int, bias: bool) -> None:
    module = PriorAttention(
        EMBED,
        4,
        bias=bias,
        batch_first=True,
        dtype=torch.float64,
        prior=GeneralizedGaussian(4, init="spread"),
        logit_scale=SSMax(4, init=0.8),
        num_kv_heads=kv_heads,
    )
    assert module.in_proj_weight.shape == (EMBED + 2 * kv_heads * 3, EMBED)
    query, key, value = inputs(batch_first=True)
    padding = torch.tensor([[False] * 6 + [True], [False] * 7])
    wanted = expected_weights(module, query, key, True, padding)
    flags = {"is_causal": True, "key_padding_mask": padding, "average_attn_weights": False}
    out, weights = module(query, key, value, **flags)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-9)
    v = (value @ module.in_proj_weight[-kv_heads * 3 :].T).unflatten(-1, (-1, 3)).transpose(1, 2)
    heads = wanted @ v.repeat_interleave(4 // kv_heads, 1)
    by_hand = module.out_proj(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, by_hand, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(module(query, key, value, need_weights=False, **flags)[0], out, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_queries_see_positions_up_to_their_own(need_weights: bool) -> None:
    """Fewer queries than keys end at the last key, unlike a triangle that starts in the upper left corner."""
    _, ours = pair(batch_first=True)
    query, key, value = inputs(batch_first=True)
    whole, _ = ours(query[:, -1:], key, value)
    last, _ = ours(query, key, value, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(last[:, -1:], whole, rtol=1e-9, atol=1e-9)
    changed = key.clone()
    changed[:, -1] += 1
    moved, _ = ours(query, changed, value, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(moved[:, :-1], last[:, :-1], rtol=1e-12, atol=1e-12)
    assert ((moved[:, -1] - last[:, -1]).abs() > 1e-4).any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_positions_and_documents_match_the_dense_formula(need_weights: bool) -> None:
    _, ours = pair(Laplace(HEADS), batch_first=True)
    x = torch.randn(BATCH, 6, EMBED, dtype=torch.float64)
    flags = {"is_causal": True, "need_weights": need_weights}
    whole, _ = ours(x, x, x, document_ids=torch.tensor([[0, 0, 1, 1, 1, 1]] * BATCH), **flags)
    first, second = x[:, :2], x[:, 2:]
    torch.testing.assert_close(whole[:, :2], ours(first, first, first, **flags)[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole[:, 2:], ours(second, second, second, **flags)[0], rtol=1e-9, atol=1e-9)
    apart = torch.arange(6) * 3
    stretched, _ = ours(x, x, x, query_positions=apart, key_positions=apart, **flags)
    ours.prior = Laplace(HEADS, slopes=[3 * float(s) for s in Laplace(HEADS).slope])
    torch.testing.assert_close(stretched, ours(x, x, x, **flags)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", [name for name, prior in CATALOGUE.items() if not prior.over_grid])
@settings(max_examples=examples(4))
@given(
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 20)),
    unit=st.integers(1, 7),
    start=st.integers(-30, 30),
    has_gaps=st.booleans(),
    per_text=st.booleans(),
    seed=st.integers(0, 999),
)
def test_cross_attention_matches_the_dense_formula(
    name: str, need_weights: bool, lengths: tuple[int, int], unit: int, start: int, has_gaps: bool, per_text: bool,
    seed: int,
) -> None:  # fmt: skip
    """Two texts with different lengths, widths and positions: the dense formula in float64, with all gradients."""
    torch.manual_seed(seed)
    prior = catalogue_prior(name)
    ours = PriorAttention(EMBED, HEADS, kdim=7, vdim=5, batch_first=True, dtype=torch.float64, prior=prior)
    written = torch.randn(BATCH, lengths[0], EMBED, dtype=torch.float64, requires_grad=True)
    read, said = (torch.randn(BATCH, lengths[1], n, dtype=torch.float64, requires_grad=True) for n in (7, 5))
    here, there = start + unit * torch.arange(lengths[0]), torch.arange(lengths[1])
    if has_gaps:
        there = there + torch.randint(0, 5, there.shape).cumsum(0)
    if per_text:
        here, there = (x + torch.randint(-9, 9, (BATCH, 1)) for x in (here, there))

    out, _ = ours(written, read, said, query_positions=here, key_positions=there, need_weights=need_weights)

    assert ours.in_proj_bias is not None
    projections = (ours.q_proj_weight, ours.k_proj_weight, ours.v_proj_weight)
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, weight, bias in zip((written, read, said), projections, ours.in_proj_bias.chunk(3), strict=True)
    )
    log_prior = prior.log_prior(here, there, torch.float64)
    hidden = log_prior == -torch.inf  # the window hides all keys from some queries
    logits = q @ k.mT / (EMBED // HEADS) ** 0.5 + log_prior.masked_fill(hidden, -1e9)
    weights = logits.softmax(-1).masked_fill(hidden, 0)
    expected = ours.out_proj((weights @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, expected, rtol=1e-7, atol=1e-9)

    cotangent = torch.randn(out.shape, dtype=torch.float64)
    leaves: dict[str, Tensor] = {"query": written, "key": read, "value": said}
    leaves |= {leaf: parameter for leaf, parameter in ours.named_parameters() if parameter.requires_grad}
    found, wanted = (
        torch.autograd.grad((x * cotangent).sum(), list(leaves.values()), materialize_grads=True)
        for x in (out, expected)
    )
    for leaf, mine, dense in zip(leaves, found, wanted, strict=True):
        # Parameters of priors are float32, and so are their gradients.
        tolerance = 3e-6 * max(1.0, float(dense.abs().max())) if leaf.startswith("prior.") else 1e-8
        torch.testing.assert_close(mine, dense, rtol=1e-7, atol=tolerance, msg=leaf)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("lengths", [(3, 8), (8, 3)])
def test_without_positions_queries_end_at_the_last_key(lengths: tuple[int, int], need_weights: bool) -> None:
    """The default suits decoding, but not attention between texts. The documentation says to pass positions there."""
    ours = PriorAttention(
        EMBED, HEADS, batch_first=True, dtype=torch.float64, prior=catalogue_prior("generalized_gaussian")
    )
    written, read = (torch.randn(BATCH, length, EMBED, dtype=torch.float64) for length in lengths)
    out, _ = ours(written, read, read, need_weights=need_weights)

    def at(here: Tensor) -> Tensor:
        there = torch.arange(lengths[1])
        return ours(written, read, read, query_positions=here, key_positions=there, need_weights=need_weights)[0]

    places = torch.arange(lengths[0])
    torch.testing.assert_close(out, at(places + lengths[1] - lengths[0]), rtol=1e-9, atol=1e-9)
    assert ((out - at(places)).abs() > 1e-4).any()


@pytest.mark.parametrize("need_weights", [True, False])
def test_queries_without_visible_keys_give_the_output_of_zeros(need_weights: bool) -> None:
    """``nn.MultiheadAttention`` returns nan for them. Here, zeros enter the output projection."""
    _, ours = pair(batch_first=True)
    query, key, value = inputs(batch_first=True)
    padding = torch.tensor([[True] * KEYS, [False] * KEYS])
    out, weights = ours(query, key, value, key_padding_mask=padding, need_weights=need_weights)
    torch.testing.assert_close(out[0], ours.out_proj.bias.expand(QUERIES, -1))
    if need_weights:
        assert (weights[0] == 0).all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_priors_get_gradients(need_weights: bool) -> None:
    module = PriorAttention(EMBED, HEADS, batch_first=True, prior=Laplace(HEADS, learn=True), logit_scale=SSMax(HEADS))
    x = torch.randn(BATCH, QUERIES, EMBED)
    module(x, x, x, need_weights=need_weights, is_causal=True)[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).any(), name


def test_priors_stay_float32_in_half_precision_layers() -> None:
    module = PriorAttention(EMBED, HEADS, prior=Laplace(HEADS), logit_scale=SSMax(HEADS)).to(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert dtypes["prior.log_slope"] == dtypes["logit_scale.s"] == torch.float32
    assert dtypes["in_proj_weight"] == dtypes["out_proj.weight"] == torch.bfloat16
    x = torch.randn(QUERIES, BATCH, EMBED).bfloat16()
    for need_weights in (True, False):
        assert module(x, x, x, need_weights=need_weights)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("embed_dim", {"embed_dim": 13}),
        ("embed_dim", {"embed_dim": 0}),
        ("num_heads", {"num_heads": 0}),
        ("num_kv_heads", {"num_kv_heads": 2}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("dropout", {"dropout": 1.0}),
        ("dropout", {"dropout": -0.5}),
        ("prior", {"prior": Laplace(HEADS + 1)}),
        ("logit_scale", {"logit_scale": SSMax(1)}),
    ],
)
def test_invalid_constructor_arguments_are_refused(name: str, bad: dict[str, Any]) -> None:
    good: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS}
    with pytest.raises(ValueError, match=name):
        PriorAttention(**good | bad)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("query", {"query": torch.zeros(BATCH, QUERIES, EMBED + 1)}),
        ("key", {"key": torch.zeros(BATCH, KEYS, EMBED + 1)}),
        ("value", {"value": torch.zeros(BATCH, KEYS, 1)}),
        ("value", {"value": torch.zeros(BATCH, KEYS + 1, EMBED)}),
        ("key", {"key": torch.zeros(KEYS, EMBED)}),
        ("query", {"query": torch.zeros(1, BATCH, QUERIES, EMBED)}),
        ("key", {"key": torch.zeros(BATCH + 1, KEYS, EMBED)}),
        ("attn_mask", {"attn_mask": torch.zeros(BATCH, QUERIES, KEYS)}),
        ("attn_mask", {"attn_mask": torch.zeros(QUERIES + 1, KEYS)}),
        ("attn_mask", {"attn_mask": torch.zeros(QUERIES, KEYS, dtype=torch.int64)}),
        ("key_padding_mask", {"key_padding_mask": torch.zeros(BATCH, KEYS + 1, dtype=torch.bool)}),
        ("key_padding_mask", {"key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.int64)}),
        ("query_positions", {"query_positions": torch.arange(QUERIES + 1)}),
        ("document_ids", {"document_ids": torch.zeros(BATCH, KEYS + 1, dtype=torch.int64)}),
    ],
)
def test_invalid_inputs_are_refused(name: str, bad: dict[str, Any], need_weights: bool) -> None:
    module = PriorAttention(EMBED, HEADS, batch_first=True, prior=Window(HEADS, 3))
    good = {
        "query": torch.zeros(BATCH, QUERIES, EMBED),
        "key": torch.zeros(BATCH, KEYS, EMBED),
        "value": torch.zeros(BATCH, KEYS, EMBED),
    }
    with pytest.raises(ValueError, match=name):
        module(**good | bad, need_weights=need_weights)
