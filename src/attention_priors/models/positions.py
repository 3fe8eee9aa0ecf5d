"""Where the tokens of a decoder stand: positions, documents and padding, from what transformers hands over."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from attention_priors.attention import ShardedSequence
from attention_priors.attention.geometry import positions_in_documents
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import check_positions


class Places:
    """Where queries and keys stand, and which keys are padding, of other documents or hidden by a mask.

    Keys are all tokens so far, in order; queries are the new ones, the last ``length`` of them. Positions count from
    the first token that is not padding, or from the start of each document, unless they are given.

    Args:
        batch: ``B``.
        length: ``L``, the number of new tokens.
        device: of the tokens.
        attention_mask: ``(B, num_keys)``, 1 for tokens and 0 for padding; or ``(B or 1, H or 1, L, num_keys)``,
            boolean (True = may see) or added to the logits, which hides more than the causal mask does.
        position_ids: ``(B or 1, num_keys)``, integers; without a cache these are all new tokens. They rise within a
            document: where they do not, a new one begins (as in a batch that transformers packed), unless
            ``document_ids`` or a 4-D mask say who sees whom. Those of padding do not matter. Beside a cache
            ``(B or 1, L)`` is enough if it is what the model would count itself.
        document_ids: ``(B, num_keys)``, integers.
        cache: of the tokens before.
        sequence: says that the tokens are a share of longer sequences, which tell positions, documents and padding.

    Raises:
        ValueError: naming the argument, its shape, and what was expected.
    """

    num_keys: int
    """Keys in use. (A compiled model with a static cache cannot know: it sees all slots, and hides the empty ones.)"""
    positions: Tensor
    """Of the new tokens, ``(1 or B, L)``."""
    key_positions: Tensor | None = None
    """``(1 or B, num_keys)``; None if they are what :func:`attend` takes them for."""
    key_padding_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    """As :func:`attend` takes it: True = forbidden."""
    document_ids: Tensor | None = None

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        sequence: ShardedSequence | None = None,
    ) -> None:
        self.sequence = sequence
        if sequence is not None:
            if any(x is not None for x in (attention_mask, position_ids, document_ids, cache)):
                raise ValueError(
                    "sequence holds positions, documents and padding itself, and has no cache: give it without "
                    "attention_mask, position_ids, document_ids, past_key_values and use_cache"
                )
            self.num_keys, self.positions = length, sequence.positions.to(device)
            return
        past: Any = 0 if cache is None else cache.get_seq_length()
        compiling = torch.compiler.is_compiling()
        self._batch, self._length = batch, length
        self._looks = not compiling  # what is compiled does not look at values
        self._positions_are_given = False
        self._queries_are_last = not (compiling and isinstance(past, Tensor))
        if cache is not None and not self._queries_are_last:
            self.num_keys = cache.get_mask_sizes(length, 0)[0]
        else:
            past = int(past)
            self.num_keys = past + length
        self._slots_there_are = self.num_keys
        if cache is not None:
            self._slots_there_are = max(self.num_keys, cache.get_mask_sizes(length, 0)[0])
        self._slots = torch.arange(self.num_keys, device=device).unsqueeze(0)
        self.positions = torch.arange(length, device=device).unsqueeze(0) + past
        if document_ids is not None:
            self._take_documents(document_ids)
        if attention_mask is not None and attention_mask.dim() == 4:
            self._take_dense_mask(attention_mask)
        elif attention_mask is not None:
            self._take_padding(attention_mask)
        if position_ids is not None:
            self._take_positions(position_ids)
        if self.attn_mask is not None and self._looks:
            self._refuse_the_future()

    def for_attention(self, prior: Prior | None) -> tuple[Tensor | None, Tensor | None]:
        """The positions of queries and keys that :func:`attend` needs to be told; None for what it finds itself.

        Padding shifts all positions of a text alike, which a prior over distances does not see.
        """
        if not self._positions_are_given:
            terms = () if prior is None else prior.terms()
            absolute = any(Structure.STATIONARY not in term.structure for term in terms)
            if self._queries_are_last and (self.key_positions is None or not absolute):
                return None, None
        return self.positions, self.key_positions

    def to(self, device: torch.device | str | int) -> Places:
        """The same places on another device: accelerate asks for it where a model is spread over several."""
        if self.positions.device == torch.device(device):
            return self
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device))
        return moved

    # ---- what is given

    def _take_documents(self, document_ids: Tensor) -> None:
        if tuple(document_ids.shape) != (self._batch, self.num_keys):
            raise ValueError(
                f"document_ids must cover every key, shape ({self._batch}, {self.num_keys}), got "
                f"{tuple(document_ids.shape)}"
            )
        self.document_ids = document_ids
        self.positions = positions_in_documents(document_ids)[:, -self._length :]

    def _take_padding(self, attention_mask: Tensor) -> None:
        shape = tuple(attention_mask.shape)
        # A static cache has room after the last token, and a mask may cover it.
        fewest = self.num_keys if self._queries_are_last else 0
        if len(shape) != 2 or shape[0] != self._batch or not fewest <= shape[1] <= self._slots_there_are:
            raise ValueError(
                f"attention_mask must have shape ({self._batch}, {self.num_keys}), 1 for tokens and 0 for padding, "
                f"or 4 dimensions, got {shape}"
            )
        padding = attention_mask[:, : self.num_keys] == 0
        if self._looks and not bool(padding.any()):
            return
        padding = nn.functional.pad(padding, (0, self.num_keys - padding.shape[1]), value=True)
        self.key_padding_mask = padding
        if self.document_ids is None:
            first_token = (~padding).int().argmax(-1, keepdim=True)
            self.positions = self.positions - first_token
            self.key_positions = self._slots - first_token

    def _take_dense_mask(self, mask: Tensor) -> None:
        batch, _, queries, keys = mask.shape
        fits = batch in (1, self._batch) and queries == self._length and self.num_keys <= keys <= self._slots_there_are
        if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ValueError(
                f"a 4-D attention_mask must be boolean (True = may see) or floating point (added to the logits), of "
                f"shape ({self._batch}, heads or 1, {self._length}, {self.num_keys}), got {mask.dtype} "
                f"{tuple(mask.shape)}"
            )
        mask = mask[..., : self.num_keys]
        if mask.dtype == torch.bool:
            self.attn_mask = ~mask
        else:
            # transformers writes the least finite number where it means -inf.
            self.attn_mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))

    def _take_positions(self, position_ids: Tensor) -> None:
        check_positions("position_ids", position_ids)
        shape = tuple(position_ids.shape)
        if self._queries_are_last:
            fits = len(shape) == 2 and (shape[1] == self.num_keys or shape[1] == self._length)
        else:
            fits = len(shape) == 2 and self._length <= shape[1] <= self.num_keys
        if not fits or shape[0] not in (1, self._batch):
            raise ValueError(
                f"position_ids must have shape ({self._batch}, {self.num_keys}), a position for each token so far, got "
                f"{shape}"
            )
        own = self._own_positions()
        if shape[1] < self.num_keys and (self._queries_are_last or shape[1] == self._length):
            self._require_own_positions(position_ids)
            return
        given = self._fill_empty_slots(position_ids.to(torch.int64).expand(self._batch, -1))
        real = None if self.key_padding_mask is None else ~self.key_padding_mask
        if real is not None:
            given = torch.where(real, given, own)
        if self._looks:
            if bool((given == own).all()):
                return
            least = int((given if real is None else given.masked_fill(~real, 0)).min())
            if least < 0:
                raise ValueError(f"position_ids must not be negative, got {least}")
        self._positions_are_given = True
        self.key_positions = given
        self.positions = given[:, -self._length :]
        if not self._queries_are_last:
            self.positions = position_ids.to(torch.int64)[:, -self._length :]
        if self.attn_mask is None:
            self._begin_documents(given, real)

    def _begin_documents(self, given: Tensor, real: Tensor | None) -> None:
        """A new document wherever a token's position is not beyond that of the token before it."""
        if real is None:
            falls = nn.functional.pad(given[:, 1:] <= given[:, :-1], (1, 0))
        else:
            latest = torch.where(real, self._slots, -1).cummax(-1).values
            before = nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
            falls = real & (before >= 0) & (given <= given.gather(-1, before.clamp(min=0)))
        if self.document_ids is not None:
            same = nn.functional.pad(self.document_ids[:, 1:] == self.document_ids[:, :-1], (1, 0))
            if self._looks and bool((falls & same).any()):
                raise ValueError("position_ids must rise within each of the documents that document_ids name")
            return
        if self._looks and not bool(falls.any()):
            return
        self.document_ids = falls.long().cumsum(-1)
        if self._looks and bool((positions_in_documents(self.document_ids) == given).all()):
            # Then attend() finds them itself, which is faster.
            self._positions_are_given, self.key_positions = False, None

    def _fill_empty_slots(self, positions: Tensor) -> Tensor:
        """Positions of a static cache's empty slots: after all that there is, so that nobody sees them."""
        empty = self.num_keys - positions.shape[1]
        if not empty:
            return positions
        after = positions.amax(-1, keepdim=True) + 1 + torch.arange(empty, device=positions.device)
        return torch.cat([positions, after], -1)

    def _own_positions(self) -> Tensor:
        """Of all keys, as they are counted here: ``(1 or B, num_keys)``."""
        if self.key_positions is not None:
            return self.key_positions
        return self._slots if self.document_ids is None else positions_in_documents(self.document_ids)

    def _require_own_positions(self, position_ids: Tensor) -> None:
        """Refuse positions of the new tokens alone unless they follow from what is known of the tokens before."""
        same = position_ids == self.positions
        if self.key_padding_mask is not None and self._queries_are_last:
            same = same | self.key_padding_mask[:, -self._length :]
        message = (
            f"position_ids {tuple(position_ids.shape)} are those of new tokens beside a cache, and not those that the "
            f"model counts itself: a prior needs those of all tokens so far, shape ({self._batch}, {self.num_keys})"
        )
        if not self._looks:
            torch._assert_async(same.all(), message)  # pyright: ignore[reportPrivateImportUsage]
        elif not bool(same.all()):
            raise ValueError(message)

    def _refuse_the_future(self) -> None:
        mask = self.attn_mask
        assert mask is not None
        forbidden = mask if mask.dtype == torch.bool else torch.isneginf(mask)
        later = self._own_positions()[:, None, None, :] > self.positions[:, None, :, None]
        if bool((later & ~forbidden).any()):
            raise ValueError(
                "a 4-D attention_mask must not let a token see one at a later position: the decoder is causal "
                "(position_ids say where tokens stand)"
            )
