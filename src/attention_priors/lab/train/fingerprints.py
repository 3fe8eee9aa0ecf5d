"""What tells files from others that were, or will be, in the same place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from attention_priors._io import checksum
from attention_priors.lab.data.shards import MANIFEST, PARTS, TokenShards, read_manifest, shards_of

CONFIG = ("config.json",)
"""Files of a model that say how it is made."""

MODEL = (*CONFIG, "adapter_config.json", "*.safetensors", "*.bin")
"""Files of a model that say what it is."""


def files_fingerprint(name: str, patterns: tuple[str, ...]) -> str | None:
    """SHA-256 (64 hex digits) of some files of a folder; None if there is no such folder.

    A model on the Hugging Face Hub has none: its commit changes with every word of its page.

    Args:
        name: of the folder.
        patterns: of the files' names.
    """
    folder = Path(name)
    if not folder.is_dir():
        return None
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return _digest([[path.name, checksum(path)] for path in files])


def tokens_fingerprint(folder: Path) -> str | None:
    """SHA-256 (64 hex digits) of prepared tokens and their tokenizer, from the manifest; None if there are none.

    The same tokens have the same one, whatever versions they were prepared with.

    Raises:
        ShardError: the preparation has not finished.
    """
    if not (folder / MANIFEST).is_file():
        return None
    TokenShards(folder)  # complains of what is not finished
    manifest = read_manifest(folder)
    shards = {part: [shard.sha256 for shard in shards_of(manifest, part)] for part in PARTS}
    return _digest([manifest["tokenizer_fingerprint"], shards])


def _digest(content: list) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
