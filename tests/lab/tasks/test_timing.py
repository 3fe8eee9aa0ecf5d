"""The passes that the task ``timing`` measures."""

from typing import Any

import pytest
import torch
from known_models import SCHEMES, tiny_decoder

from attention_priors.lab.tasks.timing import KINDS, WARM_UP, time_model

MODELS = {name: tiny_decoder(**scheme) for name, scheme in SCHEMES.items()}
MODELS["forget gates"] = tiny_decoder(key_bias={"name": "forget_gate", "init": 2.0})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 40])
def test_each_pass_reads_what_its_kind_says(name: str, length: int) -> None:
    model, seen = MODELS[name], []

    def note(module: torch.nn.Module, args: Any, options: Any, out: Any) -> None:
        seen.append((args[0], module.training, out.logits.detach()))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        for kind in KINDS:
            time_model(model, length, passes=2, kind=kind, seed=5)
    finally:
        handle.remove()
    # Warm-up, the pass whose memory is measured, and two timed passes.
    each = WARM_UP + 1 + 2
    # The cache is filled in two parts: logits are needed for one token only.
    filling = 2 if length > 1 else 0
    assert len(seen) == 3 * each + filling
    assert not model.training
    forward, both, decode = seen[:each], seen[each : 2 * each], seen[2 * each + filling :]
    assert {tuple(tokens.shape) for tokens, _, _ in forward + both} == {(1, length)}
    assert {tuple(tokens.shape) for tokens, _, _ in decode} == {(1, 1)}
    assert [training for _, training, _ in forward + both + decode] == [False] * each + [True] * each + [False] * each
    # Every decoded token sees the whole text, and no token of an earlier pass.
    for _, _, logits in decode:
        torch.testing.assert_close(logits[:, -1], forward[0][2][:, -1], atol=1e-4, rtol=1e-4)
