"""GGUF export of decoders with ALiBi, for llama.cpp and programs based on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attention_priors._io import replacing
from attention_priors.models.decoder import LAYER_PARTS, PriorDecoderForCausalLM
from attention_priors.priors import Laplace, Prior, alibi_slopes

ARCHITECTURE = "refact"
"""llama.cpp architecture that matches the decoder: RMSNorm, SwiGLU, grouped-query attention, no biases, ALiBi."""
PRE_TOKENIZERS = {("Digits", "ByteLevel"): "refact", ("ByteLevel",): "gpt-2"}
"""llama.cpp's names of pre-tokenizers."""


def export_gguf(
    model: PreTrainedModel,
    path: str | Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    context_length: int = 4096,
) -> None:
    """Export a decoder with ALiBi as a GGUF file, in the dtype of its weights. llama.cpp's tools quantise the file.

    Args:
        model: a :class:`PriorDecoderForCausalLM` whose layers all have the prior ``laplace`` with ALiBi's slopes, and
            no encoding, logit scale, null key or gate. llama.cpp has no other prior.
        path: ``.gguf`` file. The file is written atomically.
        tokenizer: the model's tokenizer, byte-level BPE as :func:`train_tokenizer` makes. None for a file without
            tokens, which takes token ids.
        context_length: default context length for programs, in tokens. ALiBi sets no limit.

    Raises:
        ModuleNotFoundError: gguf is not installed.
        ValueError: llama.cpp cannot compute the model, or tokenize as the tokenizer does. The message says why.
    """
    path = Path(path)
    if path.suffix != ".gguf":
        raise ValueError(f"path must end in .gguf, got {str(path)!r}")
    _check(model)
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "export_gguf needs gguf: pip install 'attention-priors[export]'", name="gguf"
        ) from error
    words = None if tokenizer is None else _vocabulary(tokenizer, model.config.vocab_size)
    config: Any = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.REFACT, config.num_hidden_layers)
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        writer.add_context_length(context_length)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("none" if words is None else "gpt2")
        if words is not None and tokenizer is not None:
            pre, tokens, kinds, merges = words
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(tokens)
            writer.add_token_types(kinds)
            writer.add_token_merges(merges)
            writer.add_add_bos_token(False)
            for name in ("bos", "eos"):
                if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
                    getattr(writer, f"add_{name}_token_id")(number)
        for key, tensor in model.state_dict().items():
            if ".prior." in key or (key == "lm_head.weight" and config.tie_word_embeddings):
                continue
            name = names.get_name(key, try_suffixes=(".weight",))
            assert name is not None, key
            # GGUF keeps norms in float32. NumPy has no bfloat16; float32 holds its values exactly.
            wide = tensor.dim() == 1 or tensor.dtype == torch.bfloat16
            writer.add_tensor(name, (tensor.float() if wide else tensor).numpy(force=True))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _check(model: object) -> None:
    if not isinstance(model, PriorDecoderForCausalLM):
        raise ValueError(
            f"model must be a PriorDecoderForCausalLM, got {type(model).__name__}; for others use llama.cpp's converter"
        )
    for index, layer in enumerate(model.model.layers):
        config = model.config.of_layer(index)
        attention: Any = layer.self_attn
        prior: Prior | None = model.model.prior if model.config.share_prior else attention.prior
        beside = [part for part in LAYER_PARTS if part != "prior" and getattr(config, part) is not None]
        terms = [] if prior is None else list(prior.terms())
        reason = f"it has {' and '.join(beside)}" if beside else None
        if len(terms) != 1 or not isinstance(terms[0], Laplace):
            reason = f"its prior is {config.prior!r}"
        elif not torch.allclose(terms[0].slope.double().cpu(), alibi_slopes(config.num_attention_heads), rtol=1e-5):
            reason = "its slopes are not ALiBi's"
        if reason is not None:
            raise ValueError(
                f"layer {index} cannot be exported to GGUF: {reason}. llama.cpp supports only the prior 'laplace' with "
                "ALiBi's slopes; export_onnx supports every model"
            )


def _vocabulary(tokenizer: PreTrainedTokenizerFast, size: int) -> tuple[str, list[str], list[int], list[str]]:
    """Return llama.cpp's name of the pre-tokenizer, the tokens in order, their types, and the merges."""
    whole: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = whole["pre_tokenizer"] or {}
    kinds = tuple(step.get("type") for step in steps.get("pretokenizers", [steps]))
    if whole["model"]["type"] != "BPE" or whole["normalizer"] is not None or kinds not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer must be byte-level BPE, as train_tokenizer makes, got {whole['model']['type']} after {kinds}; "
            "without a tokenizer, the file takes token ids"
        )
    if len(tokenizer) != size:
        raise ValueError(f"tokenizer has {len(tokenizer)} tokens, but the model has {size}")
    special = {*tokenizer.all_special_ids}
    tokens = [*map(str, tokenizer.convert_ids_to_tokens([*range(size)]))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    return PRE_TOKENIZERS[kinds], tokens, [3 if number in special else 1 for number in range(size)], merges
