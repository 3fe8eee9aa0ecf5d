"""RULER's variable tracking: settings and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import ClassVar

from attention_priors.checks import check_booleans, check_positive_integers
from attention_priors.lab.tasks.ruler.settings import Generators, Prompt, RulerSettings

_QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {number} in the text above."
)
_ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {number}, they are: "
)
_EXAMPLE_NUMBER = "12345"
_MOST_EXAMPLE_HOPS = 10


@dataclass(frozen=True)
class VariableSettings(RulerSettings):
    """Settings of variable tracking.

    A chain is a list of assignments, in order: ``VAR ABCDE = 12345``, then ``VAR FGHIJ = VAR ABCDE``, and so on. The
    assignments are hidden between lines of noise. The question asks for all variables of the first chain.

    Attributes:
        num_chains: Chains in a prompt. Each has a number of its own.
        num_hops: Assignments from variable to variable in a chain.
        example: Whether RULER's few-shot example precedes the question. The example has up to 500 tokens.

    Raises:
        ValueError: a number is below 1, or ``num_hops`` is above 10, RULER's limit for the example.
    """

    num_chains: int = 1
    num_hops: int = 4
    example: bool = True

    haystack = "noise"
    probe = f"VAR {ascii_uppercase} = 1234567890"
    long_step = 10
    name_letters: ClassVar[int] = 5

    def __post_init__(self) -> None:
        check_positive_integers(num_chains=self.num_chains, num_hops=self.num_hops)
        check_booleans(example=self.example)
        if self.example and self.num_hops > _MOST_EXAMPLE_HOPS:
            raise ValueError(
                f"num_hops must be at most {_MOST_EXAMPLE_HOPS} with an example; it is {self.num_hops}. Use a lower "
                "number or example=False"
            )

    @property
    def num_sentences(self) -> int:
        """Smallest number of lines: RULER draws as many places as a chain has variables."""
        return self.num_hops + 1

    @property
    def num_answers(self) -> int:
        """Number of variables of a chain."""
        return self.num_hops + 1

    @property
    def answer_tokens(self) -> int:
        """Default number of tokens reserved for the answer: one for each letter and space. RULER reserves 30."""
        return (self.name_letters + 1) * self.num_answers

    @property
    def example_settings(self) -> RulerSettings | None:
        """Settings of the few-shot example."""
        return _ExampleSettings(self.num_chains, self.num_hops, example=False) if self.example else None

    def write(
        self, units: Sequence[str], generators: Generators, *, depth: float | None = None, example: str | None = None
    ) -> Prompt:
        """Write a prompt; see `RulerSettings.write`. All depths are drawn."""
        lines = list(units)
        expected, depths, asked = (), (), ""
        for names, number in self._draw_chains(generators):
            places = sorted(generators.python.sample(range(len(lines)), len(names)))
            if not expected:
                expected, asked = tuple(names), number
                depths = tuple(100 * place / len(units) for place in places)
            values = [number, *(f"VAR {name} " for name in names[:-1])]  # RULER's lines end in this space
            for index, (place, name, value) in enumerate(zip(places, names, values, strict=True)):
                lines.insert(place + index, f"VAR {name} = {value}")
        prefix = _ANSWER_PREFIX.format(count=self.num_answers, number=asked)
        text = _QUESTION.format(context="\n".join(lines), number=asked) + prefix
        if example is not None:
            text = f"{self._with_new_names(example, generators)}\n{text}"
        # The prefix ends in a space and the answer begins with another, as in RULER's example.
        return Prompt(text, prefix, expected, depths, f" {' '.join(expected)}")

    def _draw_chains(self, generators: Generators) -> list[tuple[list[str], str]]:
        """Return the names of each chain and its number."""
        count, names = self.num_chains * self.num_answers, []
        while len(set(names)) < count:  # RULER fails if two names coincide
            names = [_draw_name(self.name_letters, generators.python) for _ in range(count)]
        chains = (names[start : start + self.num_answers] for start in range(0, count, self.num_answers))
        return [(chain, self._draw_number(generators)) for chain in chains]

    def _draw_number(self, generators: Generators) -> str:
        return str(generators.numpy.randint(10000, 99999))

    def _with_new_names(self, example: str, generators: Generators) -> str:
        """Return the example with other variables and another number, replaced one after another as in RULER."""
        for name in example.split()[-self.num_answers :]:
            example = example.replace(name, _draw_name(len(name), generators.python))
        return example.replace(_EXAMPLE_NUMBER, self._draw_number(generators))


class _ExampleSettings(VariableSettings):
    """Settings of the few-shot example: short names, and one number for all chains."""

    name_letters = 3

    def _draw_number(self, generators: Generators) -> str:
        return _EXAMPLE_NUMBER


def _draw_name(letters: int, rng: Random) -> str:
    return "".join(rng.choices(ascii_uppercase, k=letters))


VARIABLE_TASKS: dict[str, VariableSettings] = {
    "variable_tracking": VariableSettings(),
    "variable_tracking_2_hops": VariableSettings(num_hops=2, example=False),
}
"""RULER's task ``vt``, and a task for short contexts that RULER does not have."""
