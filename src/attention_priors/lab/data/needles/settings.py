"""What sets the eight needle tasks of RULER apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from attention_priors.checks import check_choice, check_positive_integers

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""RULER's 40 depths in percent, from 0 to 100; needles in an essay stand at different ones."""

HaystackKind = Literal["noise", "essay", "needle"]
KeyKind = Literal["words", "uuids"]
ValueKind = Literal["numbers", "uuids"]


@dataclass(frozen=True)
class NeedleSettings:
    """One needle-in-a-haystack task.

    A needle is a sentence that gives one value of one key. The question asks for all values of some keys.

    Attributes:
        haystack: What the needles hide in. ``"noise"``: five short sentences, repeated; ``"essay"``: running text;
            ``"needle"``: needles that nobody asks for.
        key_kind: ``"words"``, an adjective and a noun, or ``"uuids"``.
        value_kind: ``"numbers"`` of seven digits, or ``"uuids"``.
        num_keys: Keys that have needles of their own. RULER raises its ``num_needle_k`` to the number of queries;
            here the number is stated as it is used.
        num_values: Values, and needles, of each key.
        num_queries: Keys that are asked for.

    Raises:
        ValueError: a kind is unknown, a number is below 1, ``num_queries`` is above ``num_keys``, or an essay would
            have more needles than RULER has depths: 40.
    """

    haystack: HaystackKind
    key_kind: KeyKind = "words"
    value_kind: ValueKind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def __post_init__(self) -> None:
        check_choice("haystack", self.haystack, get_args(HaystackKind))
        check_choice("key_kind", self.key_kind, get_args(KeyKind))
        check_choice("value_kind", self.value_kind, get_args(ValueKind))
        check_positive_integers(num_keys=self.num_keys, num_values=self.num_values, num_queries=self.num_queries)
        if self.num_queries > self.num_keys:
            raise ValueError(f"num_queries must be at most num_keys, {self.num_keys}; it is {self.num_queries}")
        if self.haystack == "essay" and self.num_needles > len(DEPTHS):
            raise ValueError(
                f"num_keys * num_values must be at most {len(DEPTHS)} in an essay; it is {self.num_needles}"
            )

    @property
    def num_needles(self) -> int:
        """Needles in a prompt; those that are the haystack do not count."""
        return self.num_keys * self.num_values

    @property
    def num_answers(self) -> int:
        """Values that an answer must hold."""
        return self.num_queries * self.num_values


NEEDLE_TASKS: dict[str, NeedleSettings] = {
    "niah_single_1": NeedleSettings("noise"),
    "niah_single_2": NeedleSettings("essay"),
    "niah_single_3": NeedleSettings("essay", value_kind="uuids"),
    "niah_multikey_1": NeedleSettings("essay", num_keys=4),
    "niah_multikey_2": NeedleSettings("needle"),
    "niah_multikey_3": NeedleSettings("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": NeedleSettings("essay", num_values=4),
    "niah_multiquery": NeedleSettings("essay", num_keys=4, num_queries=4),
}
"""The tasks of RULER's ``synthetic.yaml``, under RULER's names."""
