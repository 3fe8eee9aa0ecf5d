"""RULER's needle tasks: settings, random draws, and prompts."""

from __future__ import annotations

import bisect
import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from random import Random
from typing import Literal, get_args

from attention_priors.checks import check_choice, check_positive_integers
from attention_priors.lab.tasks.ruler.settings import Generators, HaystackKind, Prompt, RulerSettings

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""RULER's 40 depths in percent, from 0 to 100; each needle in an essay has a different depth."""

KeyKind = Literal["words", "uuids"]
ValueKind = Literal["numbers", "uuids"]


@dataclass(frozen=True)
class NeedleSettings(RulerSettings):
    """Settings of one needle-in-a-haystack task.

    A needle is a sentence that gives one value of one key. The question asks for all values of some keys.

    Attributes:
        haystack: Text around the needles. ``"noise"`` repeats five short sentences. ``"essay"`` is running text.
            ``"needle"`` consists of other needles.
        key_kind: Kind of the keys. Either ``"words"``, an adjective and a noun, or ``"uuids"``.
        value_kind: ``"numbers"`` of seven digits, or ``"uuids"``.
        num_keys: Number of keys with needles of their own. RULER raises its ``num_needle_k`` to the number of queries.
            This number is used as it is.
        num_values: Values, and needles, of each key.
        num_queries: Number of keys in the question.
        num_questions: Questions of a training text, one after another. RULER asks one. Each other question draws its
            keys anew, so keys repeat. Evaluation asks only the first question.
        num_restatements: Needles that a training text states again after its questions. Each is drawn anew, and its
            value counts as an answer. RULER has none, and evaluation leaves them out.

    Raises:
        ValueError: a kind is unknown, a number is below 1 (``num_restatements`` below 0), ``num_queries`` is above
            ``num_keys``, or an essay would have more needles than RULER's 40 depths.
    """

    haystack: HaystackKind
    key_kind: KeyKind = "words"
    value_kind: ValueKind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    num_questions: int = 1
    num_restatements: int = 0

    probe = "What is the special magic number for quick-fox? 1234567890"
    long_step = 25

    def __post_init__(self) -> None:
        check_choice("haystack", self.haystack, get_args(HaystackKind))
        check_choice("key_kind", self.key_kind, get_args(KeyKind))
        check_choice("value_kind", self.value_kind, get_args(ValueKind))
        check_positive_integers(
            num_keys=self.num_keys,
            num_values=self.num_values,
            num_queries=self.num_queries,
            num_questions=self.num_questions,
        )
        if not isinstance(self.num_restatements, int) or self.num_restatements < 0:
            raise ValueError(f"num_restatements must be an integer of at least 0; it is {self.num_restatements}")
        if self.num_queries > self.num_keys:
            raise ValueError(f"num_queries must be at most num_keys, {self.num_keys}; it is {self.num_queries}")
        if self.haystack == "essay" and self.num_sentences > len(DEPTHS):
            raise ValueError(
                f"num_keys * num_values must be at most {len(DEPTHS)} in an essay; it is {self.num_sentences}"
            )

    @property
    def num_sentences(self) -> int:
        """Number of needles in a prompt, without distractors."""
        return self.num_keys * self.num_values

    @property
    def num_answers(self) -> int:
        """Number of values in a right answer."""
        return self.num_queries * self.num_values

    @property
    def answer_tokens(self) -> int:
        """Default number of tokens reserved for the answer."""
        return 128

    def write(
        self, units: Sequence[str], generators: Generators, *, depth: float | None = None, example: str | None = None
    ) -> Prompt:
        """Write a prompt; see `RulerSettings.write`. No needle task has an example."""
        draws = draw(self, len(units), generators.python)
        if depth is not None:
            draws = at_depth(draws, len(units), depth)
        more = []
        for _ in range(self.num_questions - 1):
            again = render(self, replace(draws, queries=_draw_queries(self, generators.python)))
            more.append((again.answer_prefix, again.answer))
        for _ in range(self.num_restatements):
            key, value = generators.python.choice(draws.needles)
            beginning, end = _needle(self, draws.keys[key], draws.values[key][value])
            more.append((f"\n{beginning}", end))
        return render(self, draws, units)._replace(more=tuple(more))


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
"""Tasks of RULER's ``synthetic.yaml``, by RULER's names."""

# ---- draws

# RULER shuffles the needles of every prompt with the seed of the run, so all prompts of a run have the same order.
_SHUFFLE_SEED = 42
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1_000_000, 9_999_999


@dataclass(frozen=True)
class NeedleDraws:
    """All random choices of one prompt.

    Attributes:
        keys: Keys of the needles.
        values: Values of each key.
        needles: Key and value of each needle, in text order. Indices into ``keys`` and ``values[key]``.
        positions: Number of haystack units before each needle, in text order.
        depths: Depth of each needle in percent, in text order. Drawn for an essay, else ``100 * position / units``.
        distractors: Key and value of each needle that forms the haystack. Empty for other haystacks.
        queries: Indices of the keys in the question, in order.
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
        """Values that the question asks for, in order."""
        return tuple(value for query in self.queries for value in self.values[query])

    @property
    def expected_depths(self) -> tuple[float, ...]:
        """Depths in percent of the needles that hold the values of `expected`, in the same order."""
        depth_of = dict(zip(self.needles, self.depths, strict=True))
        num_values = len(self.values[0])
        return tuple(depth_of[query, value] for query in self.queries for value in range(num_values))


def draw(settings: NeedleSettings, units: int, rng: Random) -> NeedleDraws:
    """Draw the random choices in RULER's order, so that equal generator states give equal prompts.

    Args:
        settings: Settings of the task.
        units: Size of the haystack: sentences of an essay, lines of another haystack.
        rng: Generator in place of RULER's module ``random``.

    Raises:
        ValueError: a haystack other than an essay has fewer units than needles.
    """
    if settings.haystack != "essay" and units < settings.num_sentences:
        raise ValueError(f"units must be at least the number of needles, {settings.num_sentences}; it is {units}")
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
        needles.reverse()  # RULER puts the first of the shuffled needles last in the text
    return NeedleDraws(
        keys=tuple(keys),
        values=tuple(values),
        needles=tuple(needles),
        positions=tuple(positions),
        depths=tuple(depths),
        distractors=tuple(distractors),
        queries=_draw_queries(settings, rng),
    )


def _draw_queries(settings: NeedleSettings, rng: Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(settings.num_keys), settings.num_queries))


def at_depth(draws: NeedleDraws, units: int, depth: float) -> NeedleDraws:
    """Move the only queried needle to a depth from 0 to 1; leave all other draws unchanged."""
    wanted = draws.queries[0], 0
    placed = [
        (int(units * depth), 100 * depth, needle) if needle == wanted else (position, drawn, needle)
        for position, drawn, needle in zip(draws.positions, draws.depths, draws.needles, strict=True)
    ]
    placed.sort(key=lambda place: place[0])
    positions, depths, needles = zip(*placed, strict=True)
    return replace(draws, needles=tuple(needles), positions=tuple(positions), depths=tuple(depths))


class CompoundWords:
    """All distinct ``"first-second"`` words in sorted order, generated on demand: wonderwords gives six million.

    Args:
        first: Words before the hyphen.
        second: Words after the hyphen.
    """

    def __init__(self, first: Iterable[str], second: Iterable[str]) -> None:
        self._seconds = sorted(set(second))
        # Words sort by their beginnings, unless one beginning is a prefix of another ("blue-", "blue-eyed-"). Words
        # with such beginnings may interleave or coincide, so they are built and sorted together.
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

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]  # resolves negative indices and rejects those out of range
        place = bisect.bisect_right(self._ends, index)
        group = self._groups[place]
        index -= self._ends[place - 1] if place else 0
        return group + self._seconds[index] if isinstance(group, str) else group[index]


@cache
def key_words() -> CompoundWords:
    """Return the keys of kind ``"words"``: adjective and noun from the lists of ``wonderwords``.

    Raises:
        ModuleNotFoundError: ``wonderwords`` is not installed; the ``lab`` extra includes it.
    """
    return CompoundWords(_word_list("adjectivelist.txt"), _word_list("nounlist.txt"))


def _word_list(name: str) -> list[str]:
    # Read the file, because wonderwords' own functions for its lists are private.
    with (resources.files("wonderwords") / "assets" / name).open(encoding="utf-8") as lines:
        return [line.rstrip() for line in lines]


def _draw_one(kind: str, rng: Random) -> str:
    if kind == "words":
        return rng.choice(key_words())
    if kind == "numbers":
        return str(rng.randint(_SMALLEST_NUMBER, _LARGEST_NUMBER))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


# ---- text

_NEEDLE = "One of the special magic {kind} for {key} is:", " {value}."

# RULER derives the singular form from the plural by replacing words.
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
_SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)


def render(settings: NeedleSettings, draws: NeedleDraws, haystack: Sequence[str] = ()) -> Prompt:
    """Write the prompt for given draws.

    Args:
        settings: Settings of the task.
        draws: Random choices of the prompt.
        haystack: Sentences of the essay, or lines of noise. A haystack of needles comes from ``draws``.
    """
    if settings.haystack == "needle":
        haystack = ["".join(_needle(settings, key, value)) for key, value in draws.distractors]
    needles = ["".join(_needle(settings, draws.keys[key], draws.values[key][value])) for key, value in draws.needles]
    pieces = _between(haystack, draws.positions)
    if settings.haystack == "essay":
        # As in RULER, an empty piece still adds its space.
        parts = [" ".join(pieces[0])]
        for needle, piece in zip(needles, pieces[1:], strict=True):
            parts += [needle, " ".join(piece)]
        context = " ".join(parts)
    else:
        lines = list(pieces[0])
        for needle, piece in zip(needles, pieces[1:], strict=True):
            lines += [needle, *piece]
        context = "\n".join(lines)

    keys = [draws.keys[query] for query in draws.queries]
    query = _listed(keys)
    one = settings.num_answers == 1
    question, prefix = _ONE if one else _SEVERAL
    kind = settings.value_kind.removesuffix("s") if one else settings.value_kind
    answer_prefix = prefix.format(kind=kind, query=query)
    return Prompt(
        text=question.format(kind=kind, query=query, context=context) + answer_prefix,
        answer_prefix=answer_prefix,
        expected=draws.expected,
        depths=draws.expected_depths,
        answer=f" {_listed(draws.expected)}",  # listed like several keys in the question
    )


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]


def _needle(settings: NeedleSettings, key: str, value: str) -> tuple[str, str]:
    """Return a needle up to its value, and the rest."""
    beginning, end = _NEEDLE
    return beginning.format(kind=settings.value_kind, key=key), end.format(value=value)


def _between(units: Sequence[str], positions: Sequence[int]) -> list[Sequence[str]]:
    """Return the units before the first position, between positions, and after the last."""
    cuts = [0, *positions, len(units)]
    return [units[start:end] for start, end in itertools.pairwise(cuts)]
