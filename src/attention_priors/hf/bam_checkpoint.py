"""Conversion of checkpoints between the layout of BAM's authors and this package's decoder.

Their layout: ``tok_embeddings``, ``layers.N.attention.wq/wk/wv/wo``, ``layers.N.feed_forward.w1/w2/w3``,
``layers.N.attention_norm``, ``layers.N.ffn_norm``, ``norm``, ``output``. The prior's ``shape``, ``scale`` and ``loc``
are under ``prior`` (shared by all layers) or ``layers.N.attention.prior``. With SSMax there is
``layers.N.attention.seq_scale``. The authors' present code calls the prior's parameters ``theta_beta``, ``theta_alpha``
and ``theta_mu``.

``θβ = shape``, ``θα = scale``, ``θμ = loc``, one number per head in ``(1, H, 1, 1)`` or ``(H, 1)``. The formula is that
of BAM's Appendix C, as in :class:`GeneralizedGaussian`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_priors._io import read_json, write_json
from attention_priors.attention import SSMax
from attention_priors.checks import check_above, check_booleans, check_positive_integers
from attention_priors.hf.files import read_weights, write_weights
from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.priors import GeneralizedGaussian, Laplace, Uniform

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NAMES_IN_LAYERS = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.seq_scale": "self_attn.logit_scale.s",
}
PRIOR_NAMES = {"shape": "theta_beta", "scale": "theta_alpha", "loc": "theta_mu"}
PRIORS = {"bam": GeneralizedGaussian.name, "nope": Uniform.name, "alibi": Laplace.name}
"""Prior of each supported ``position_encoding`` of the authors' code, which may also end in ``_ssmax``."""
PER_HEAD = re.compile(r"(\.s|\.theta_(alpha|beta|mu))$")
NORM_EPS = 1e-5
"""Epsilon of the norms in the authors' code, the default."""
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
"""Prefixes that data parallelism and compilation add to every name."""


def load_bam_checkpoint(
    path: str | Path,
    *,
    num_heads: int | None = None,
    prior: Mapping[str, Any] | str | None = None,
    ssmax_includes_prior: bool | None = None,
    rms_norm_eps: float | None = None,
) -> PriorDecoderForCausalLM:
    """Load a checkpoint of BAM's authors into :class:`PriorDecoderForCausalLM`.

    Sizes come from the weights. The number of heads comes from the prior or SSMax's scales. Without either, the number
    comes from ``num_heads``, or from the ``args.json`` that the authors' training writes beside ``model.pt``.

    ``args.json`` also holds ``position_encoding`` (``bam``, ``nope`` and ``alibi``, each with or without ``_ssmax``)
    and ``ssmax_prior``. Arguments must agree with ``args.json``.

    The prior is that of the authors' training code since May 2025, ``-e^scale (|d| + ε)^shape``. Earlier training code
    computed ``-(|d| e^scale + ε)^shape`` from weights of identical names, which this function cannot distinguish.

    Args:
        path: a weights file, or a folder with ``model.safetensors`` or ``model.pt``. Weights files end in
            ``.safetensors``, ``.pt`` or ``.pth``.
        num_heads: number of query heads. Required for weights without a prior and SSMax, unless ``args.json`` has it.
        prior: description of the prior, for weights without a prior and without ``args.json``. ``"uniform"`` for the
            authors' NoPE, ``"laplace"`` for their ALiBi.
        ssmax_includes_prior: whether SSMax multiplies content and prior, or content alone. None for the authors' value:
            ``ssmax_prior`` of ``args.json``, or True for a prior in the weights and False for any other.
        rms_norm_eps: epsilon of the norms. By default the value of ``args.json``, or the authors' 1e-5.

    Returns:
        The model in evaluation mode, in the dtype of its embeddings. The prior's shape and scale train, and its
            location if it is not 0.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not such a checkpoint; its parts, ``args.json`` and the arguments contradict each other;
            or ``position_encoding`` is not supported (rotary, sinusoidal). The message says which and why.
    """
    if rms_norm_eps is not None:
        check_above(0, rms_norm_eps=rms_norm_eps)
    file, encoding, arguments = _find(Path(path))
    weights = {WRAPPERS.sub("", name): tensor for name, tensor in read_weights(file).items()}
    state, shared = _our_names(weights, file)
    if encoding is not None:
        prior = _prior_of(encoding, state, file, shared, prior)
    stated = False if encoding == "alibi_ssmax" else arguments.get("ssmax_prior")
    includes_prior = _place_of_scale(ssmax_includes_prior, stated, shared is not None)
    heads = _number_of_heads(state, num_heads, arguments.get("n_heads"))
    config = _config(state, file, heads, shared, prior, includes_prior)
    config.rms_norm_eps = float(rms_norm_eps or arguments.get("norm_eps") or NORM_EPS)
    given = arguments.get("n_kv_heads")
    if given is not None and given != config.num_key_value_heads:
        raise ValueError(f"args.json has n_kv_heads={given}, but the weights have {config.num_key_value_heads}")
    with torch.device("meta"):
        model = PriorDecoderForCausalLM(config)
    if shared is None:
        for layer in range(config.num_hidden_layers):
            described = config.make_prior()
            assert described is not None
            lead = f"model.layers.{layer}.self_attn.prior."
            state |= {lead + name: parameter.detach() for name, parameter in described.named_parameters()}
    expected = model.state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    _check_names_and_shapes(state, {name: tuple(tensor.shape) for name, tensor in expected.items()}, file)
    dtype = state["model.embed_tokens.weight"].dtype
    for name, tensor in state.items():
        # Priors and logit scales stay in float32.
        state[name] = tensor.to(torch.float32 if ".prior." in name or ".logit_scale." in name else dtype)
    loaded = model.load_state_dict(state, strict=False, assign=True)  # a tied output layer has no weights of its own
    assert not loaded.unexpected_keys
    model.tie_weights()
    config.dtype = dtype
    return model.eval()


def save_bam_checkpoint(model: PriorDecoderForCausalLM, path: str | Path, *, theta_names: bool = False) -> None:
    """Save a decoder in the layout of BAM's authors.

    The authors' code does not support grouped-query attention, so key and value heads are repeated, one per query head.
    The saved model computes the same outputs, and loads into a decoder with equal numbers of key and query heads.

    Args:
        model: the decoder. Its prior must be a :class:`GeneralizedGaussian`, uniform or None, its encoding None, and
            its logit scale :class:`SSMax` itself or None.
        path: a folder or a weights file. A folder gets ``model.pt`` and ``args.json``, which the authors' code loads. A
            ``.safetensors``, ``.pt`` or ``.pth`` file requires the authors' ``rms_norm_eps``, 1e-5, and
            ``ssmax_prior``, True. Weights do not hold these two values.
        theta_names: whether to name the prior's parameters ``theta_beta``, ``theta_alpha`` and ``theta_mu``, as the
            authors' present code does. False for ``shape``, ``scale`` and ``loc``.

    Raises:
        ValueError: ``model`` is of another class, or the layout cannot hold a part of it.
    """
    if not isinstance(model, PriorDecoderForCausalLM):
        raise ValueError(f"model must be a PriorDecoderForCausalLM, got {type(model).__name__}")
    path = Path(path)
    config = model.config
    described = config.make_prior()
    scale = config.make_logit_scale()
    content_alone = isinstance(described, GeneralizedGaussian) and scale is not None and not scale.include_prior
    for differs, what, usual in (
        (config.rms_norm_eps != NORM_EPS, f"rms_norm_eps={config.rms_norm_eps}", NORM_EPS),
        (content_alone, "the logit_scale's include_prior=False", True),
    ):
        if path.suffix and differs:
            raise ValueError(
                f"the single file {path.name} cannot hold {what}, and would be loaded with the authors' {usual}; pass "
                "a folder, whose args.json holds the value"
            )
    for name, has_place in (
        ("prior", described is None or isinstance(described, GeneralizedGaussian | Uniform)),
        ("encoding", config.encoding is None),
        ("logit_scale", scale is None or type(scale) is SSMax),  # a subclass would be loaded as SSMax
    ):
        if not has_place:
            raise ValueError(f"the layout of BAM's authors cannot hold the {name} {getattr(config, name)!r}")
    assert config.head_dim is not None
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"the code of BAM's authors needs heads of width hidden_size / heads; got {config.num_attention_heads} "
            f"heads of width {config.head_dim} with hidden_size={config.hidden_size}"
        )
    names = _names(range(config.num_hidden_layers)).items()
    theirs = {ours: name for name, ours in names if ".prior." not in ours or ("theta_" in name) == theta_names}
    weights = {theirs[name]: tensor for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, GeneralizedGaussian):  # θβ itself, also with keep_sign=True
            weights[theirs[f"{name}.theta_beta"]] = module.beta
    assert config.num_key_value_heads is not None
    for name, tensor in weights.items():
        if name.endswith(("attention.wk.weight", "attention.wv.weight")):
            heads = tensor.unflatten(0, (config.num_key_value_heads, -1))
            weights[name] = heads.repeat_interleave(config.num_attention_heads // len(heads), 0).flatten(0, 1)
        if tensor.shape == (config.num_attention_heads,) and ("prior." in name or "seq_scale" in name):
            weights[name] = tensor.view(1, -1, 1, 1)
    if path.suffix:
        write_weights(path, weights)
        return
    write_weights(path / "model.pt", weights)
    write_json(path / "args.json", _arguments(config))


def _arguments(config: PriorDecoderConfig) -> dict[str, Any]:
    """Return the arguments from which the authors' code builds the model."""
    kind = "bam" if isinstance(config.make_prior(), GeneralizedGaussian) else "nope"
    wide, width = config.intermediate_size, config.hidden_size
    arguments = {
        "dim": width,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": 1,
        # The authors' code rounds the product down.
        "ffn_dim_multiplier": wide / width if int(wide / width * width) == wide else (wide + 0.5) / width,
        "norm_eps": config.rms_norm_eps,
    }
    scale = config.make_logit_scale()
    if kind == "bam":
        arguments["global_positional_encoding"] = config.share_prior
    if kind == "bam" and scale is not None:
        arguments["ssmax_prior"] = scale.include_prior
    encoding = kind if scale is None else f"{kind}_ssmax"
    return {"args": {"position_encoding": encoding}, "model_args": arguments}


def _find(path: Path) -> tuple[Path, str | None, dict[str, Any]]:
    """Return the weights file, and from the ``args.json`` beside it the position encoding and the model's arguments."""
    if path.is_dir():
        files = [path / name for name in ("model.safetensors", "model.pt") if (path / name).is_file()]
        if not files:
            raise FileNotFoundError(f"the folder {path} has neither model.safetensors nor model.pt")
        path = files[0]
    beside = path.with_name("args.json")
    if not beside.is_file():
        return path, None, {}
    content = read_json(beside)
    arguments = content.get("model_args") if isinstance(content, dict) else None
    if not isinstance(arguments, dict):
        raise ValueError(f"{beside} has no model_args")
    training = content.get("args")
    encoding = training.get("position_encoding") if isinstance(training, dict) else None
    return path, None if encoding is None else str(encoding), arguments


def _prior_of(
    encoding: str, state: Mapping[str, Tensor], file: Path, shared: bool | None, prior: Mapping[str, Any] | str | None
) -> Mapping[str, Any] | str | None:
    """Return the prior of a position encoding, None if the weights hold it; ``prior`` must agree with the encoding."""
    kind = encoding.removesuffix("_ssmax")
    if kind not in PRIORS:
        known = ", ".join(f"{name}, {name}_ssmax" for name in PRIORS)
        raise ValueError(
            f"{file} cannot be loaded: position_encoding={encoding!r} in args.json is not supported; expected one of "
            f"{known}"
        )
    scaled = any(name.endswith("logit_scale.s") for name in state)
    if (shared is not None, scaled) != (kind == "bam", encoding != kind):
        found = f"{'no' if shared is None else 'a'} prior and {'a' if scaled else 'no'} seq_scale"
        raise ValueError(f"{file} does not match position_encoding={encoding!r} in args.json: it has {found}")
    if shared is not None or prior is None:
        return prior if shared is not None else PRIORS[kind]
    if (prior.get("name") if isinstance(prior, Mapping) else prior) != PRIORS[kind]:
        raise ValueError(
            f"prior={prior!r} contradicts position_encoding={encoding!r} in args.json, whose prior is "
            f"{PRIORS[kind]!r}: omit prior"
        )
    return prior


def _place_of_scale(given: bool | None, stated: Any, authors_default: bool) -> bool:
    """Return whether SSMax multiplies the prior too.

    The caller's value and that of ``args.json`` must agree; without either, the authors' default applies.
    """
    said = {"ssmax_includes_prior": given, "ssmax_prior of args.json": stated}
    said = {name: value for name, value in said.items() if value is not None}
    check_booleans(**said)
    if len({*said.values()}) > 1:
        raise ValueError(
            f"ssmax_includes_prior={given} contradicts args.json, which has {stated}: omit ssmax_includes_prior"
        )
    return next(iter(said.values()), authors_default)


def _names(layers: Iterable[int]) -> dict[str, str]:
    """Map the authors' name of every tensor to this package's, with both of the authors' spellings for a prior."""
    names = dict(NAMES)
    of_prior = PRIOR_NAMES | {name: name for name in PRIOR_NAMES.values()}
    names |= {f"prior.{name}": f"model.prior.{ours}" for name, ours in of_prior.items()}
    in_layers = NAMES_IN_LAYERS | {f"attention.prior.{name}": f"self_attn.prior.{x}" for name, x in of_prior.items()}
    for layer in layers:
        names |= {f"layers.{layer}.{name}": f"model.layers.{layer}.{ours}" for name, ours in in_layers.items()}
    return names


def _our_names(weights: Mapping[str, Tensor], file: Path) -> tuple[dict[str, Tensor], bool | None]:
    """Return the weights under this package's names, and whether their prior is shared (None without a prior)."""
    names = _names({int(found[1]) for found in map(re.compile(r"layers\.(\d+)\.").match, weights) if found})
    unknown = [name for name in weights if name not in names]
    state = {
        names[name]: _per_head(name, tensor) if PER_HEAD.search(names[name]) else tensor
        for name, tensor in weights.items()
        if name in names
    }
    places = {".layers." not in named for named in state if ".prior." in named}
    if unknown or "model.embed_tokens.weight" not in state:
        told = f"unexpected {_some(unknown)}" if unknown else "no tok_embeddings.weight"
        raise ValueError(f"{file} is not in the layout of BAM's authors: {told}")
    if len(places) > 1:
        raise ValueError(f"{file} has both a shared prior and priors of single layers; expected only one kind")
    return state, places.pop() if places else None


def _per_head(name: str, tensor: Tensor) -> Tensor:
    if max(tensor.shape, default=1) != tensor.numel():
        raise ValueError(f"{name} must hold one number per head, such as (1, H, 1, 1), got {tuple(tensor.shape)}")
    return tensor.flatten()


def _number_of_heads(state: Mapping[str, Tensor], given: int | None, described: int | None) -> int:
    found = {len(tensor) for name, tensor in state.items() if PER_HEAD.search(name)}
    if len(found) > 1:
        raise ValueError(f"priors and scales have different numbers of heads: {sorted(found)}")
    if given is not None:
        check_positive_integers(num_heads=given)
    for where, heads in (("num_heads", given), ("args.json", described)):
        if heads is not None and found and heads not in found:
            raise ValueError(f"{where} has {heads} heads, but priors and scales have {next(iter(found))}")
    if given is not None and described is not None and given != described:
        raise ValueError(f"num_heads={given}, but args.json has {described} heads")
    heads = next(iter(found), given or described)
    if heads is None:
        raise ValueError("the number of heads is unknown: the weights have no prior and no SSMax; pass num_heads")
    return heads


def _config(
    state: Mapping[str, Tensor],
    file: Path,
    heads: int,
    shared: bool | None,
    prior: Mapping[str, Any] | str | None,
    ssmax_includes_prior: bool,
) -> PriorDecoderConfig:
    layers = {int(name.split(".")[2]) for name in state if name.startswith("model.layers.")}
    if layers != {*range(len(layers))} or not layers:
        raise ValueError(f"{file} has layers {sorted(layers)}, expected 0, 1, 2, ... without gaps")
    first = {name.removeprefix("model.layers.0."): tensor for name, tensor in state.items() if ".layers.0." in name}
    for ours in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.gate_proj.weight"):
        if ours not in first or first[ours].dim() != 2:
            theirs = next(name for name, named in NAMES_IN_LAYERS.items() if named == ours)
            raise ValueError(f"{file} has no matrix layers.0.{theirs}")
    vocabulary, width = state["model.embed_tokens.weight"].shape
    query, key = len(first["self_attn.q_proj.weight"]), len(first["self_attn.k_proj.weight"])
    if query % heads or key % (query // heads):
        raise ValueError(
            f"{heads} heads do not divide the weights: layers.0.attention.wq has {query} rows, "
            f"layers.0.attention.wk {key}"
        )
    description: Any = prior
    if shared is not None:
        if prior is not None:
            raise ValueError(f"prior must be None, because the checkpoint holds a prior; got {prior!r}")
        location = any(name.endswith("theta_mu") and bool((value != 0).any()) for name, value in state.items())
        description = {"name": GeneralizedGaussian.name, "learn": ["alpha", "beta", *(["mu"] if location else [])]}
    elif prior is None:
        raise ValueError(
            f"{file} has no prior, and its weights do not say how it encodes positions; pass prior, such as 'uniform' "
            "for the authors' NoPE or 'laplace' for their ALiBi (rotary and sinusoidal models are not supported)"
        )
    scaled = any(name.endswith("logit_scale.s") for name in state)
    return PriorDecoderConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=len(first["mlp.gate_proj.weight"]),
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=key // (query // heads),
        head_dim=query // heads,
        tie_word_embeddings="lm_head.weight" not in state,
        prior=description,
        share_prior=bool(shared),
        logit_scale={"name": SSMax.name, "include_prior": ssmax_includes_prior} if scaled else None,
    )


def _check_names_and_shapes(state: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], file: Path) -> None:
    missing = [name for name in expected if name not in state]
    if missing:
        raise ValueError(f"{file} is incomplete: no weights for {_some(missing)} of the decoder")
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"{file}: {name} of the decoder must have shape {shape}, got {tuple(state[name].shape)}")


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
