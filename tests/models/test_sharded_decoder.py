"""A decoder whose tokens two processes share has the logits, loss and gradients of one process."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from sharded_decoders import CASES, compare_sharded

from processes import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each process."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(partial(compare_sharded, folder), folder, processes=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("variant", "setting"), CASES)
def test_logits_loss_and_gradients_match_one_process(found: list[dict[str, Any]], variant: str, setting: str) -> None:
    """Runs without a wrapper, with DDP and with FSDP2 over the same processes. Losses and priors are in float32."""
    wrappings = ("alone", "ddp") if setting == "checkpointed" else ("alone", "ddp", "fsdp2")
    for process in found:
        errors = process[f"{variant} / {setting}"]
        assert errors.keys() == {f"{how}: {what}" for how in wrappings for what in ("logits", "loss", "gradients")}
        for how in wrappings:
            assert errors[f"{how}: logits"] < 1e-10
            assert errors[f"{how}: loss"] < 5e-6
            assert errors[f"{how}: gradients"] < 1e-5


def test_unsupported_arguments_are_refused(found: list[dict[str, Any]]) -> None:
    for process in found:
        said = process["refusals"]
        assert "Shaw's vectors" in said["shaw"]
        assert "labels is not supported with a sequence" in said["labels"]
        assert "logits_to_keep is not supported with a sequence" in said["logits_to_keep"]
        assert "cache and use_cache" in said["cache"]
        assert "attention_mask" in said["mask"]
