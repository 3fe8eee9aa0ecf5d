"""transformers' Auto classes find the models: after an import, or without one by the code saved beside the weights."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tiny_decoders import FAMILIES, logits_of, tiny_config, tiny_decoder, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from attention_priors import models
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel
from processes import run_command

TRUST = {"trust_remote_code": True}
FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_prior_decoder.py"}


# The program runs each of its arguments in a copy of itself that imports transformers and not this package. "---"
# separates the output of two programs. Freeing all objects would take a second at each end.
COPIES = """import atexit, gc, os, sys
import torch
from transformers import AutoModel, PreTrainedModel
assert "attention_priors" not in sys.modules
atexit.register(gc.freeze)
for program in sys.argv[1:]:
    copy = os.fork()
    if copy == 0:
        torch.set_num_threads(1)
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(copy, 0)[1]:
        sys.exit("a program failed")
    print("---", flush=True)
"""


def test_auto_classes_find_the_models() -> None:
    sizes = tiny_config(**FAMILIES["BAM"]).to_dict()
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    assert type(config) is PriorDecoderConfig
    assert type(AutoModel.from_config(config)) is PriorDecoderModel
    assert type(AutoModelForCausalLM.from_config(config)) is PriorDecoderForCausalLM


DECODER = """
import json, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
where = {folder!r}
if {untrusted}:
    try:
        AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False)
        raise AssertionError("classes were found without an import and without trust")
    except ValueError as error:
        assert "trust_remote_code=True" in str(error)
model = AutoModelForCausalLM.from_pretrained(where, **{options}).eval()
config, base = (kind.from_pretrained(where, **{options}) for kind in (AutoConfig, AutoModel))
from attention_priors import models
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel
assert type(model) is PriorDecoderForCausalLM and type(base) is PriorDecoderModel and type(config) is PriorDecoderConfig
model.save_pretrained({again!r})
with torch.no_grad():
    print(json.dumps(model(torch.tensor({ids})).logits.tolist()))
"""
OTHER = """
import json
from transformers import {auto}
model = {auto}.from_pretrained({folder!r}, trust_remote_code=True)
print(json.dumps([type(model).__name__, float(sum(p.double().sum() for p in model.parameters()))]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot copy a process")
def test_a_new_process_loads_saved_models(tmp_path: Path) -> None:
    """A decoder, an encoder and an image classifier load after an import, or by their saved code."""
    decoder, ids = tiny_decoder(torch.float32, **FAMILIES["GOAT"]), tokens(1, 5)
    folder, again = tmp_path / "model", [tmp_path / "imported", tmp_path / "trusted"]
    decoder.save_pretrained(folder)
    programs, others = [], []
    for first, options, copy in (("import attention_priors.models.decoder", {}, again[0]), ("", TRUST, again[1])):
        described = {"folder": str(folder), "again": str(copy), "options": options, "untrusted": not first}
        programs.append(first + DECODER.format(**described, ids=ids.tolist()))
    for auto, kind, sizes in (
        ("AutoModelForMaskedLM", "PriorEncoder", {"vocab_size": 20}),
        ("AutoModelForImageClassification", "PriorVision", {"image_size": 8, "patch_size": 4, "position_table": True}),
    ):
        small = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config: Any = getattr(models, f"{kind}Config")(**small, **sizes)
        model: Any = getattr(models, auto.replace("AutoModel", kind))(config)
        model.save_pretrained(tmp_path / kind)
        programs.append(OTHER.format(auto=auto, folder=str(tmp_path / kind)))
        others.append(model)
    # No network, and an own cache.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    printed = run_command([sys.executable, "-c", COPIES, *programs], environment=environment).stdout.split("---")
    found = [json.loads(each) for each in printed[:4]]
    for logits, copy in zip(found, again, strict=False):
        torch.testing.assert_close(torch.tensor(logits), logits_of(decoder, ids), rtol=1e-5, atol=1e-5)
        assert {path.name for path in copy.iterdir()} == FILES
        assert (copy / "config.json").read_text() == (folder / "config.json").read_text()
    for (name, total), model in zip(found[2:], others, strict=True):
        assert name == type(model).__name__
        assert total == pytest.approx(float(sum(p.detach().double().sum() for p in model.parameters())))


def test_imported_classes_take_precedence(tmp_path: Path) -> None:
    """The imported classes are used, and their source is not saved with them."""
    model = tiny_decoder(torch.float32, **FAMILIES["BAM"])
    model.save_pretrained(tmp_path / "model")
    for auto, wanted in (
        (AutoModelForCausalLM, PriorDecoderForCausalLM),
        (AutoModel, PriorDecoderModel),
        (AutoConfig, PriorDecoderConfig),
    ):
        loaded = auto.from_pretrained(tmp_path / "model", trust_remote_code=True)
        assert type(loaded) is wanted
        loaded.save_pretrained(tmp_path / wanted.__name__)
        assert {path.name for path in (tmp_path / wanted.__name__).iterdir()} <= FILES


def test_saved_files_include_the_code(tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, **FAMILIES["BAM"])
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    config = json.loads((tmp_path / "config.json").read_text())
    module = (tmp_path / "modeling_prior_decoder.py").read_text()
    for reference in config["auto_map"].values():
        file, _, name = reference.partition(".")
        assert file == "modeling_prior_decoder"
        assert f" {name}" in module
    assert config["prior"] == FAMILIES["BAM"]["prior"]
    # A model from the Hub refers to its classes by the repository's name. After saving, it works from any place.
    config["auto_map"] = {"AutoConfig": "somebody/model--modeling_prior_decoder.PriorDecoderConfig"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    PriorDecoderConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "somebody" not in (tmp_path / "config.json").read_text()


def test_push_to_hub_makes_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are in one commit. No request reaches the Hub."""
    uploaded: dict[str, bytes] = {}

    def create_repo(self: Any, repo_id: str, **options: Any) -> huggingface_hub.RepoUrl:
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self: Any, repo_id: str, operations: Any, **options: Any) -> None:
        assert repo_id == "somebody/tiny"
        for operation in operations:
            with operation.as_file() as file:
                uploaded[operation.path_in_repo] = file.read()

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *a, **k: _NoCard())
    model: Any = tiny_decoder(torch.float32, **FAMILIES["BAM"])
    model.push_to_hub("somebody/tiny")
    assert uploaded.keys() >= FILES
    assert json.loads(uploaded["config.json"])["model_type"] == "prior_decoder"
    assert b"attention_priors.models.decoder" in uploaded["modeling_prior_decoder.py"]


class _NoCard:
    def save(self, path: str) -> None:
        Path(path).write_text("---\n---\n")
