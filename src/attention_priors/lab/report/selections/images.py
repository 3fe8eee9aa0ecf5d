"""The selections from results of classifiers of images."""

from __future__ import annotations

from attention_priors.lab.report.selections.results import Results, Row


def are_of_images(results: Results) -> bool:
    """Whether results are of classifiers of images."""
    return "images" in results


def training_words(results: Results) -> str:
    """At which size the models were trained, in words."""
    return f"trained at {results['recipe']['model']['image_size']}"


def image_sizes(results: Results) -> list[int]:
    """The sides of the images that the models were tested on, rising, in pixels."""
    return sorted({row["size"] for row in results["accuracy"]})


def shares_right(results: Results, scheme: str, size: int) -> list[float]:
    """The share of images of one size that are classified right, with each seed."""
    return [
        row["correct"] / row["trials"] for row in results["accuracy"] if (row["scheme"], row["size"]) == (scheme, size)
    ]


def maps_of_first_seed(results: Results, scheme: str) -> list[Row]:
    """The prior maps of a scheme's first seed; none where it has no prior."""
    mine = [row for row in results["prior_maps"] if row["scheme"] == scheme]
    return [row for row in mine if row["seed"] == mine[0]["seed"]]
