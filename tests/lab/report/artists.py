"""Artists of figures, by their ID."""

from typing import Any


def by_gid(where: Any, gid: str) -> list[Any]:
    """Return the artists of a figure or of axes that have this ID."""
    return [artist for artist in where.findobj() if artist.get_gid() == gid]
