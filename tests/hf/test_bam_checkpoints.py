"""Checkpoints of BAM's authors load into our decoder and are saved back, compared with an independent forward pass.

Weights are in float32. Logits of the order of 10 agree within 1e-9 in float64 and 1e-4 in float32.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bam_layout import alibi_slopes, forward, random_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention_priors.hf import load_bam_checkpoint, save_bam_checkpoint
from attention_priors.hf.bam_checkpoint import _arguments
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from thoroughness import examples

TOLERANCE = 1e-4


def write(folder: Path, weights: dict[str, Tensor], suffix: str = ".safetensors") -> Path:
    path = folder / f"model{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    return path


def tokens(batch: int = 2, length: int = 17) -> Tensor:
    return torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(1))


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


@given(
    heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2]),
    layers=st.integers(1, 3),
    shared=st.booleans(),
    ssmax=st.booleans(),
    theta=st.booleans(),
    suffix=st.sampled_from([".safetensors", ".pt", ".pth"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(8))
def test_logits_match_the_authors_model(
    tmp_path_factory: pytest.TempPathFactory,
    heads: int,
    group: int,
    layers: int,
    shared: bool,
    ssmax: bool,
    theta: bool,
    suffix: str,
    seed: int,
) -> None:
    names = ("theta_beta", "theta_alpha", "theta_mu") if theta else ("shape", "scale", "loc")
    sizes: dict[str, Any] = {"heads": heads * group, "kv_heads": heads, "layers": layers}
    weights = random_checkpoint(shared=shared, ssmax=ssmax, names=names, seed=seed, **sizes)
    model = load_bam_checkpoint(write(tmp_path_factory.mktemp("bam"), weights, suffix))
    expected = forward(weights, tokens(), heads * group)
    assert difference(expected, logits(model, tokens())) < TOLERANCE
    assert difference(expected, logits(model.double(), tokens())) < 1e-9


def test_configs_follow_the_weights(tmp_path: Path) -> None:
    weights = random_checkpoint(heads=4, kv_heads=2, shared=False)
    config = load_bam_checkpoint(write(tmp_path, weights)).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 48, 40)
    assert (config.num_hidden_layers, config.share_prior, config.tie_word_embeddings) == (2, False, False)
    assert config.rms_norm_eps == 1e-5
    assert config.prior == {"name": "generalized_gaussian", "learn": ["alpha", "beta", "mu"]}
    assert config.logit_scale == {"name": "ssmax", "include_prior": True}


def test_packed_documents_match_separate_ones(tmp_path: Path) -> None:
    weights = random_checkpoint()
    documents = torch.tensor([[0] * 6 + [1] * 11, [0] * 12 + [3] * 5])
    model = load_bam_checkpoint(write(tmp_path, weights))
    expected = forward(weights, tokens(), 4, documents)
    assert difference(expected, forward(weights, tokens(), 4)) > 0.1
    assert difference(expected, logits(model, tokens(), document_ids=documents)) < TOLERANCE


def test_loaded_models_train_save_and_generate(tmp_path: Path) -> None:
    model: Any = load_bam_checkpoint(write(tmp_path, random_checkpoint()))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters()}
    generated = model.generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    step = forward(random_checkpoint(), tokens(), 4)[:, -1].argmax(-1)
    assert torch.equal(generated[:, 17], step)
    model.save_pretrained(tmp_path / "ours")
    again = PriorDecoderForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    model(tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_location_of_zero_stays_fixed(tmp_path: Path) -> None:
    weights = random_checkpoint()
    weights["prior.loc"].zero_()
    model = load_bam_checkpoint(write(tmp_path, weights))
    assert model.model.prior is not None
    assert [p.requires_grad for p in model.model.prior.parameters()] == [True, True, False]


def test_bfloat16_weights_keep_the_prior_in_float32(tmp_path: Path) -> None:
    weights = {name: x if "prior" in name or "seq" in name else x.bfloat16() for name, x in random_checkpoint().items()}
    model = load_bam_checkpoint(write(tmp_path, weights))
    assert model.dtype == torch.bfloat16
    assert {p.dtype for name, p in model.named_parameters() if "prior" in name or "scale" in name} == {torch.float32}
    assert difference(forward(weights, tokens(), 4), logits(model.float(), tokens())) < TOLERANCE


def test_the_scale_may_apply_to_content_only(tmp_path: Path) -> None:
    weights = random_checkpoint()
    model = load_bam_checkpoint(write(tmp_path, weights), ssmax_includes_prior=False)
    assert difference(forward(weights, tokens(), 4), logits(model, tokens())) > 0.1


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrapped_models_are_removed(tmp_path: Path, wrapper: str) -> None:
    weights = random_checkpoint()
    path = write(tmp_path, {wrapper + name: tensor for name, tensor in weights.items()}, ".pt")
    assert difference(forward(weights, tokens(), 4), logits(load_bam_checkpoint(path), tokens())) < TOLERANCE


def test_per_head_tensors_of_the_present_code_load(tmp_path: Path) -> None:
    weights = random_checkpoint(shared=False, names=("theta_beta", "theta_alpha", "theta_mu"))
    smaller = {n: x[0, :, 0] if "theta" in n else x[:, :, 0] if "seq_scale" in n else x for n, x in weights.items()}
    assert smaller["layers.0.attention.prior.theta_beta"].shape == (4, 1)
    model = load_bam_checkpoint(write(tmp_path, {name: x.clone() for name, x in smaller.items()}))
    assert difference(forward(weights, tokens(), 4), logits(model, tokens())) < TOLERANCE


# ---- sizes that the weights do not determine


def test_checkpoints_may_lack_prior_and_ssmax(tmp_path: Path) -> None:
    weights = random_checkpoint(shared=None, ssmax=False)
    path = write(tmp_path, weights)
    with pytest.raises(ValueError, match="pass num_heads"):
        load_bam_checkpoint(path, prior="uniform")
    with pytest.raises(ValueError, match="has no prior, and its weights do not say"):
        load_bam_checkpoint(path, num_heads=4)
    model = load_bam_checkpoint(path, num_heads=4, prior="uniform")
    assert difference(forward(weights, tokens(), 4), logits(model, tokens())) < TOLERANCE
    assert (
        difference(logits(load_bam_checkpoint(path, num_heads=4, prior="laplace"), tokens()), logits(model, tokens()))
        > 0.1
    )


def test_a_training_folder_determines_heads_and_norm(tmp_path: Path) -> None:
    weights = random_checkpoint(shared=None, ssmax=False, kv_heads=2)
    write(tmp_path, weights, ".pt")
    arguments = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 0.1}
    (tmp_path / "args.json").write_text(json.dumps({"args": {}, "model_args": arguments}))
    model = load_bam_checkpoint(tmp_path, prior="uniform")
    assert difference(forward(weights, tokens(), 4, eps=0.1), logits(model, tokens())) < TOLERANCE
    assert difference(forward(weights, tokens(), 4), logits(model, tokens())) > 0.01
    (tmp_path / "args.json").write_text(json.dumps({"model_args": arguments | {"n_kv_heads": 4}}))
    with pytest.raises(ValueError, match="has n_kv_heads=4"):
        load_bam_checkpoint(tmp_path, prior="uniform")
    (tmp_path / "args.json").write_text("[]")
    with pytest.raises(ValueError, match="has no model_args"):
        load_bam_checkpoint(tmp_path)


def write_folder(folder: Path, weights: dict[str, Tensor], encoding: str, **model_args: Any) -> Path:
    """Write a folder in the format of the authors' training."""
    folder.mkdir(exist_ok=True)
    write(folder, weights, ".pt")
    content = {"args": {"position_encoding": encoding}, "model_args": {"dim": 32, "n_heads": 4} | model_args}
    (folder / "args.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ssmax_prior", [True, False])
def test_ssmax_prior_of_args_json_places_the_scale(tmp_path: Path, shared: bool, ssmax_prior: bool) -> None:
    weights = random_checkpoint(shared=shared)
    folder = write_folder(tmp_path / "bam", weights, "bam_ssmax", ssmax_prior=ssmax_prior)
    model = load_bam_checkpoint(folder)
    expected = forward(weights, tokens(), 4, scales_prior=ssmax_prior)
    assert difference(expected, forward(weights, tokens(), 4, scales_prior=not ssmax_prior)) > 0.1
    assert difference(expected, logits(model, tokens())) < TOLERANCE
    load_bam_checkpoint(folder, ssmax_includes_prior=ssmax_prior)
    with pytest.raises(
        ValueError, match=f"ssmax_includes_prior={not ssmax_prior} contradicts args.json, which has {ssmax_prior}"
    ):
        load_bam_checkpoint(folder, ssmax_includes_prior=not ssmax_prior)
    save_bam_checkpoint(model, tmp_path / "again")
    assert difference(logits(load_bam_checkpoint(tmp_path / "again"), tokens()), logits(model, tokens())) == 0


@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("ssmax", [True, False])
@pytest.mark.parametrize("kind", ["nope", "alibi"])
def test_models_without_prior_weights_load(tmp_path: Path, kind: str, ssmax: bool, heads: int) -> None:
    """Their ALiBi scales content only. ``args.json`` may describe them, or be missing."""
    weights = random_checkpoint(shared=None, ssmax=ssmax, heads=heads, kv_heads=heads, width=8 * heads)
    encoding, prior = f"{kind}_ssmax" if ssmax else kind, "laplace" if kind == "alibi" else "uniform"
    folder = write_folder(tmp_path / "model", weights, encoding, dim=8 * heads, n_heads=heads)
    expected = forward(
        weights, tokens(), heads, scales_prior=False, slopes=alibi_slopes(heads) if kind == "alibi" else None
    )
    alone = write(tmp_path, weights)
    models = [
        load_bam_checkpoint(folder),
        load_bam_checkpoint(folder, prior={"name": prior}),
        load_bam_checkpoint(alone, prior=prior, num_heads=heads),
    ]
    for model in models:
        assert difference(expected, logits(model.double(), tokens())) < 1e-6
    other = "uniform" if kind == "alibi" else "laplace"
    with pytest.raises(ValueError, match=f"prior='{other}' contradicts position_encoding='{encoding}' in args.json"):
        load_bam_checkpoint(folder, prior=other)


@pytest.mark.parametrize(
    "encoding", ["rotary", "rotary_ssmax", "rotary_local", "sinusoidal", "sinusoidal_ssmax", "laplace", "fourier"]
)
@pytest.mark.parametrize("prior", [None, "uniform"])
def test_unsupported_position_encodings_are_refused(tmp_path: Path, encoding: str, prior: str | None) -> None:
    weights = random_checkpoint(shared=None, ssmax=encoding.endswith("_ssmax"))
    folder = write_folder(tmp_path, weights, encoding)
    match = f"position_encoding='{encoding}'.* expected one of bam, bam_ssmax, nope, nope_ssmax, alibi, alibi_ssmax"
    with pytest.raises(ValueError, match=match):
        load_bam_checkpoint(folder, prior=prior)


@pytest.mark.parametrize(
    ("encoding", "options", "found"),
    [
        ("nope", {"shared": True, "ssmax": False}, "a prior and no seq_scale"),
        ("bam", {"shared": None, "ssmax": False}, "no prior and no seq_scale"),
        ("bam", {"shared": False, "ssmax": True}, "a prior and a seq_scale"),
        ("alibi_ssmax", {"shared": None, "ssmax": False}, "no prior and no seq_scale"),
    ],
)
def test_position_encodings_that_contradict_the_weights_are_refused(
    tmp_path: Path, encoding: str, options: dict[str, Any], found: str
) -> None:
    folder = write_folder(tmp_path, random_checkpoint(**options), encoding)
    with pytest.raises(ValueError, match=f"position_encoding='{encoding}' in args.json: it has {found}"):
        load_bam_checkpoint(folder)


def test_ssmax_prior_must_be_a_boolean(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ssmax_prior of args\.json must be True or False, got 'no'"):
        load_bam_checkpoint(write_folder(tmp_path, random_checkpoint(), "bam_ssmax", ssmax_prior="no"))
    with pytest.raises(ValueError, match="ssmax_includes_prior must be True or False, got 0"):
        load_bam_checkpoint(write(tmp_path, random_checkpoint()), ssmax_includes_prior=0)  # pyright: ignore[reportArgumentType]


def test_tied_embeddings_load(tmp_path: Path) -> None:
    weights = random_checkpoint()
    del weights["output.weight"]
    model = load_bam_checkpoint(write(tmp_path, weights))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = forward(weights | {"output.weight": weights["tok_embeddings.weight"]}, tokens(), 4)
    assert difference(expected, logits(model, tokens())) < TOLERANCE


# ---- saving


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("shared", [True, False])
def test_saving_is_the_inverse_of_loading(tmp_path: Path, suffix: str, shared: bool) -> None:
    weights = random_checkpoint(shared=shared)
    model = load_bam_checkpoint(write(tmp_path, weights))
    path = tmp_path / f"back{suffix}"
    save_bam_checkpoint(model, path)
    back = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, "model.safetensors"])
    save_bam_checkpoint(model, path, theta_names=True)
    assert difference(logits(load_bam_checkpoint(path), tokens()), logits(model, tokens())) == 0


def decoder(**changes: Any) -> PriorDecoderForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "initializer_range": 0.3, "rms_norm_eps": 1e-5}
    return PriorDecoderForCausalLM(PriorDecoderConfig(**sizes | changes)).eval()


def test_our_models_can_be_saved_in_the_authors_layout(tmp_path: Path) -> None:
    prior = {"name": "generalized_gaussian", "init": "roles", "keep_sign": True}
    model = decoder(prior=prior, logit_scale={"name": "ssmax", "init": 0.4}, tie_word_embeddings=True)
    save_bam_checkpoint(model, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    assert difference(forward(weights, tokens(), 4), logits(model, tokens())) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_saving_repeats_shared_key_heads(tmp_path: Path, kv_heads: int) -> None:
    """The authors' code never repeats them. It multiplies query and key heads one by one."""
    model = decoder(prior="generalized_gaussian", num_key_value_heads=kv_heads)
    save_bam_checkpoint(model, tmp_path / "saved")
    weights = torch.load(tmp_path / "saved" / "model.pt", weights_only=True)
    assert {weights[f"layers.0.attention.{name}.weight"].shape for name in ("wq", "wk", "wv")} == {(32, 32)}
    assert json.loads((tmp_path / "saved" / "args.json").read_text())["model_args"]["n_kv_heads"] == 4
    assert difference(forward(weights, tokens(), 4), logits(model, tokens())) < TOLERANCE
    loaded = load_bam_checkpoint(tmp_path / "saved")
    assert difference(logits(loaded, tokens()), logits(model, tokens())) < TOLERANCE


def test_a_single_file_cannot_store_the_scale_of_content(tmp_path: Path) -> None:
    scale = {"name": "ssmax", "init": 0.4, "include_prior": False}
    model = decoder(prior={"name": "generalized_gaussian", "init": "roles"}, logit_scale=scale)
    with pytest.raises(ValueError, match=r"cannot hold the logit_scale's include_prior=False.*pass a folder"):
        save_bam_checkpoint(model, tmp_path / "model.pt")
    assert not os.listdir(tmp_path)
    save_bam_checkpoint(model, tmp_path / "folder")
    assert json.loads((tmp_path / "folder" / "args.json").read_text())["model_args"]["ssmax_prior"] is False
    assert difference(logits(load_bam_checkpoint(tmp_path / "folder"), tokens()), logits(model, tokens())) == 0


def test_a_folder_stores_settings_beside_the_weights(tmp_path: Path) -> None:
    model = decoder(prior="uniform", rms_norm_eps=0.1)
    save_bam_checkpoint(model, tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["args.json", "model.pt"]
    loaded = load_bam_checkpoint(tmp_path / "saved")
    assert difference(logits(loaded, tokens()), logits(model, tokens())) == 0
    save_bam_checkpoint(decoder(prior="generalized_gaussian", share_prior=True, logit_scale="ssmax"), tmp_path / "bam")
    content = json.loads((tmp_path / "bam" / "args.json").read_text())
    assert content["args"] == {"position_encoding": "bam_ssmax"}
    assert content["model_args"]["global_positional_encoding"] is True
    assert content["model_args"]["ssmax_prior"] is True


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_single_file_cannot_store_the_norms_epsilon(tmp_path: Path, name: str) -> None:
    model = decoder(prior="generalized_gaussian", rms_norm_eps=1e-6)
    with pytest.raises(ValueError, match=r"cannot hold rms_norm_eps=1e-06.*1e-05.*pass a folder"):
        save_bam_checkpoint(model, tmp_path / name)
    assert not os.listdir(tmp_path)
    save_bam_checkpoint(model, tmp_path / "folder")
    assert difference(logits(load_bam_checkpoint(tmp_path / "folder"), tokens()), logits(model, tokens())) == 0
    alone = (tmp_path / "folder" / "model.pt").rename(tmp_path / "model.pt")
    given = load_bam_checkpoint(alone, rms_norm_eps=1e-6)
    assert difference(logits(given, tokens()), logits(model, tokens())) == 0
    with pytest.raises(ValueError, match="rms_norm_eps must be a finite number above 0, got 0"):
        load_bam_checkpoint(alone, rms_norm_eps=0)


@given(width=st.integers(1, 300), wide=st.integers(1, 3000))
def test_feed_forward_widths_match_the_authors(width: int, wide: int) -> None:
    config = PriorDecoderConfig(hidden_size=width, intermediate_size=wide, num_attention_heads=1)
    # Computed as in their code.
    assert int(_arguments(config)["model_args"]["ffn_dim_multiplier"] * width) == wide


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prior": "laplace"}, "cannot hold the prior 'laplace'"),
        ({"encoding": "rotary"}, "cannot hold the encoding 'rotary'"),
        ({"head_dim": 4}, "4 heads of width 4 with hidden_size=32"),
        ({"logit_scale": "residual_ssmax"}, "cannot hold the logit_scale 'residual_ssmax'"),
    ],
)
def test_models_outside_the_layout_are_not_saved(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_bam_checkpoint(decoder(**changes), tmp_path / "model.pt")
    assert not os.listdir(tmp_path)


def test_other_model_classes_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model must be a PriorDecoderForCausalLM, got Linear"):
        save_bam_checkpoint(torch.nn.Linear(2, 2), tmp_path)  # pyright: ignore[reportArgumentType]


# ---- errors


class Bomb:
    """Object whose full unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_loading_runs_no_code(tmp_path: Path) -> None:
    path, mark = tmp_path / "model.pt", tmp_path / "ran"
    torch.save(random_checkpoint() | {"extra": Bomb(mark)}, path)
    with pytest.raises(ValueError, match="could run arbitrary code") as error:
        load_bam_checkpoint(path)
    assert "mkdir" in str(error.value)  # the rejected object
    assert "safetensors.torch.save_file" in str(error.value)  # the cure
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # the code did not run


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": 1}, path)
    with pytest.raises(ValueError, match="got 'a': int"):
        load_bam_checkpoint(path)
    torch.save([torch.zeros(2)], path)
    with pytest.raises(ValueError, match="must hold a state dict, got list"):
        load_bam_checkpoint(path)
    torch.save({"model": random_checkpoint()}, path)
    with pytest.raises(ValueError, match="'model': dict"):
        load_bam_checkpoint(path)
    whole = write(tmp_path, random_checkpoint(), ".pt").read_bytes()
    for junk in (b"", b"junk", b"\x80", b"PK\x03\x04", bytes(range(256))):
        path.write_bytes(junk)
        with pytest.raises(ValueError, match=r"model\.pt (is not a valid PyTorch file|was not read)"):
            load_bam_checkpoint(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a valid PyTorch file"):
        load_bam_checkpoint(path)
    whole = write(tmp_path, random_checkpoint()).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        load_bam_checkpoint(tmp_path / "cut.safetensors")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_bam_checkpoint(tmp_path / "nothing.pt")
    (tmp_path / "model.txt").touch()
    with pytest.raises(ValueError, match=r"end in .safetensors, .pt, .pth, got '.txt'"):
        load_bam_checkpoint(tmp_path / "model.txt")


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    weights: dict[str, Any] = random_checkpoint() | {name.replace("__", "."): x for name, x in changes.items()}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (changed(lm_head=torch.zeros(2)), "unexpected lm_head"),
        (changed(tok_embeddings__weight=None), "no tok_embeddings.weight"),
        (changed(prior__loc=None), "no weights for model.prior.theta_mu"),
        (changed(layers__1__ffn_norm__weight=None), "no weights for model.layers.1.post_attention_layernorm.weight"),
        (changed(layers__0__attention__wq__weight=None), "no matrix layers.0.attention.wq.weight"),
        (changed(layers__7__ffn_norm__weight=torch.ones(32)), "has layers \\[0, 1, 7\\]"),
        (
            changed(layers__1__attention__wo__weight=torch.ones(32, 30)),
            "must have shape \\(32, 32\\), got \\(32, 30\\)",
        ),
        (changed(prior__loc=torch.ones(1, 5, 1, 1)), "different numbers of heads"),
        (changed(prior__loc=torch.ones(1, 2, 2, 1)), "one number per head"),
        (changed(layers__0__attention__prior__loc=torch.ones(4)), "expected only one kind"),
        (changed(layers__1__attention__seq_scale=None), "no weights for model.layers.1.self_attn.logit_scale.s"),
        (random_checkpoint(heads=4) | {"layers.0.attention.wk.weight": torch.ones(9, 32)}, "4 heads do not divide"),
    ],
)
def test_incomplete_checkpoints_are_refused(tmp_path: Path, weights: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_bam_checkpoint(write(tmp_path, weights))


def test_arguments_that_contradict_the_weights_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, random_checkpoint())
    with pytest.raises(ValueError, match="num_heads has 8 heads, but priors and scales have 4"):
        load_bam_checkpoint(path, num_heads=8)
    with pytest.raises(ValueError, match="the checkpoint holds a prior"):
        load_bam_checkpoint(path, prior="laplace")
    with pytest.raises(ValueError, match="num_heads must be a positive integer"):
        load_bam_checkpoint(path, num_heads=0)
