import pytest

from attention_priors.lab.study.recipe import Scheme
from attention_priors.lab.study.results import describe
from attention_priors.lab.study.runs import folder_name


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({}, "no position but the causal mask"),
        ({"prior": "laplace"}, "laplace"),
        ({"prior": {"name": "laplace", "learn": True}}, "laplace(learn=True)"),
        ({"prior": "laplace", "share_prior": True}, "laplace · one prior for all layers"),
        (
            {"prior": [{"name": "laplace"}, {"name": "window", "size": 8}], "encoding": "rotary"},
            "rotary · laplace · window(size=8)",
        ),
        (
            {
                "encoding": {"name": "rotary", "base": 500.0},
                "logit_scale": {"name": "ssmax", "init": 0.2},
                "evaluation": {"tolerance": 0.01, "chunk": 64},
            },
            "rotary(base=500.0) · ssmax(init=0.2) · tolerance=0.01 at evaluation",
        ),
        (
            {"prior": "laplace", "null_logit": "null_key", "key_bias": {"name": "forget_gate", "init": 2.0}},
            "laplace · null_key · forget_gate(init=2.0)",
        ),
        (
            {
                "layer_pattern": ["near", "far"],
                "layer_kinds": {"near": {"prior": {"name": "window", "size": 8}, "encoding": "rotary"}, "far": {}},
            },
            "layers near, far · near: window(size=8) + rotary · far: nothing more",
        ),
    ],
)
def test_schemes_are_described_as_code(scheme, words):
    assert describe(Scheme.model_validate(scheme)) == words


def test_long_values_are_shortened():
    scheme = Scheme(prior={"name": "clipped_offsets", "max_offset": 16, "init": {"bias": [[-0.25] * 33] * 4}})
    assert describe(scheme) == "clipped_offsets(max_offset=16, init={'bias': [[-0.25, -0.25, -0.25…)"


@pytest.mark.parametrize(
    ("scheme", "folder"),
    [
        ("BAM+SSMax", "BAM+SSMax"),
        ("RoPE, local (16)", "RoPE_local_16_"),
        ("a/../b", "a_.._b"),
        ("..", "_"),
        (".hidden", "hidden"),
        ("θ = 1", "_1"),
    ],
)
def test_folders_of_schemes_have_plain_names(scheme, folder):
    assert folder_name(scheme) == folder
