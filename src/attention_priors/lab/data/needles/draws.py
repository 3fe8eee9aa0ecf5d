"""What is random in a prompt: keys, values, where the needles stand, what is asked."""

from __future__ import annotations

import bisect
import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from random import Random
from typing import overload

from attention_priors.lab.data.needles.settings import DEPTHS, NeedleSettings

# RULER shuffles the needles of every prompt by the seed of the run, so all prompts of a run shuffle alike.
_SHUFFLE_SEED = 42
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1_000_000, 9_999_999


@dataclass(frozen=True)
class NeedleDraws:
    """Everything random in one prompt.

    Attributes:
        keys: The keys of the needles.
        values: For each key, its values.
        needles: For each needle, in the order in which they stand in the text, its key and value as indices into
            ``keys`` and ``values[key]``.
        positions: For each needle, in the same order, how many units of haystack stand before it.
        depths: The same in percent: as drawn for an essay, ``100 * position / units`` otherwise.
        distractors: Key and value of each needle that the haystack is made of; empty for other haystacks.
        queries: Indices of the keys that are asked for, in the order of the question.
    """

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    needles: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]
    depths: tuple[float, ...]
    distractors: tuple[tuple[str, str], ...]
    queries: tuple[int, ...]

    @property
    def expected(self) -> tuple[str, ...]:
        """The values asked for, in the order of the question."""
        return tuple(value for query in self.queries for value in self.values[query])

    @property
    def expected_depths(self) -> tuple[float, ...]:
        """Depths in percent of the needles that hold the values of `expected`, in its order."""
        depth_of = dict(zip(self.needles, self.depths, strict=True))
        num_values = len(self.values[0])
        return tuple(depth_of[query, value] for query in self.queries for value in range(num_values))


def draw(settings: NeedleSettings, units: int, rng: Random) -> NeedleDraws:
    """Draw in the order in which RULER does, so that the same state of the generator gives the same prompt.

    Args:
        settings: The task.
        units: Size of the haystack: sentences of an essay, lines of another haystack.
        rng: Plays the part of the module ``random`` in RULER.

    Raises:
        ValueError: A haystack other than an essay has fewer units than there are needles.
    """
    if settings.haystack != "essay" and units < settings.num_needles:
        raise ValueError(f"units must be at least the number of needles, {settings.num_needles}; it is {units}")
    keys, values = [], []
    for _ in range(settings.num_keys):
        keys.append(_draw_one(settings.key_kind, rng))
        values.append(tuple(_draw_one(settings.value_kind, rng) for _ in range(settings.num_values)))
    needles = list(itertools.product(range(settings.num_keys), range(settings.num_values)))
    Random(_SHUFFLE_SEED).shuffle(needles)

    distractors: list[tuple[str, str]] = []
    if settings.haystack == "essay":
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        positions = [int(units * (depth / 100)) for depth in depths]
    else:
        if settings.haystack == "needle":
            for _ in range(units):
                key = _draw_one(settings.key_kind, rng)
                distractors.append((key, _draw_one(settings.value_kind, rng)))
        positions = sorted(rng.sample(range(units), len(needles)))
        depths = [100 * position / units for position in positions]
        needles.reverse()  # RULER inserts the first of the shuffled needles last in the text
    return NeedleDraws(
        keys=tuple(keys),
        values=tuple(values),
        needles=tuple(needles),
        positions=tuple(positions),
        depths=tuple(depths),
        distractors=tuple(distractors),
        queries=tuple(rng.sample(range(settings.num_keys), settings.num_queries)),
    )


def at_depth(draws: NeedleDraws, units: int, depth: float) -> NeedleDraws:
    """Move the one needle that is asked for to a depth from 0 to 1; everything else stays as it was drawn."""
    wanted = draws.queries[0], 0
    placed = [
        (int(units * depth), 100 * depth, needle) if needle == wanted else (position, drawn, needle)
        for position, drawn, needle in zip(draws.positions, draws.depths, draws.needles, strict=True)
    ]
    placed.sort(key=lambda place: place[0])
    positions, depths, needles = zip(*placed, strict=True)
    return NeedleDraws(
        draws.keys, draws.values, tuple(needles), tuple(positions), tuple(depths), draws.distractors, draws.queries
    )


class CompoundWords(Sequence[str]):
    """All distinct ``"first-second"``, sorted, without making the list: of wonderwords' words, six million.

    Args:
        first: What stands before the hyphen.
        second: What stands after it.
    """

    def __init__(self, first: Iterable[str], second: Iterable[str]) -> None:
        self._seconds = sorted(set(second))
        # A word sorts as its beginning does, unless one beginning starts another ("blue-", "blue-eyed-"): words
        # with such beginnings may alternate, and be equal, so that they are made and sorted together.
        groups: list[list[str]] = []
        for beginning in sorted({f"{word}-" for word in first}):
            if groups and beginning.startswith(groups[-1][0]):
                groups[-1].append(beginning)
            else:
                groups.append([beginning])
        self._groups: list[str | list[str]] = [
            group[0] if len(group) == 1 else sorted({one + other for one in group for other in self._seconds})
            for group in groups
        ]
        sizes = (len(self._seconds) if isinstance(group, str) else len(group) for group in self._groups)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        index = range(len(self))[index]  # counts negative indices, and refuses those out of range
        place = bisect.bisect_right(self._ends, index)
        group = self._groups[place]
        index -= self._ends[place - 1] if place else 0
        return group + self._seconds[index] if isinstance(group, str) else group[index]


@cache
def key_words() -> CompoundWords:
    """The keys of kind ``"words"``: adjective and noun of the lists of ``wonderwords``.

    Raises:
        ModuleNotFoundError: ``wonderwords`` is not installed; the ``lab`` extra brings it.
    """
    return CompoundWords(_word_list("adjectivelist.txt"), _word_list("nounlist.txt"))


def _word_list(name: str) -> list[str]:
    # The file itself, as wonderwords' own functions for its lists are private.
    with (resources.files("wonderwords") / "assets" / name).open(encoding="utf-8") as lines:
        return [line.rstrip() for line in lines]


def _draw_one(kind: str, rng: Random) -> str:
    if kind == "words":
        return rng.choice(key_words())
    if kind == "numbers":
        return str(rng.randint(_SMALLEST_NUMBER, _LARGEST_NUMBER))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
