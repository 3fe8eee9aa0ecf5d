"""A page beside results: its tables follow them, its words stay."""

from pathlib import Path

import pytest

from attention_priors.lab.report import refresh_page, write_tables
from attention_priors.lab.report.selections.results import Results

PAGE = """# What came out

Words before. <!-- a comment of one's own -->

<!-- table: passkey -->
| what | stood here before |
<!-- end of table -->

Words between.

<!-- table: training -->
<!-- end of table -->

Words after.
"""


def test_tables_are_put_in_and_words_stay(results: Results, tmp_path: Path) -> None:
    write_tables(results, tmp_path / "tables")
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    assert refresh_page(tmp_path) == []
    fresh = (tmp_path / "README.md").read_text(encoding="utf-8")
    passkey, training = (
        (tmp_path / f"tables/{name}.md").read_text(encoding="utf-8") for name in ("passkey", "training")
    )
    assert fresh == (
        "# What came out\n\nWords before. <!-- a comment of one's own -->\n\n"
        f"<!-- table: passkey -->\n\n{passkey}\n<!-- end of table -->\n\nWords between.\n\n"
        f"<!-- table: training -->\n\n{training}\n<!-- end of table -->\n\nWords after.\n"
    )
    refresh_page(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == fresh


def test_a_table_of_earlier_results_is_not_taken_for_theirs(results: Results, tmp_path: Path) -> None:
    write_tables(results, tmp_path / "tables")
    write_tables({**results, "passkey": []}, tmp_path / "tables")
    (tmp_path / "README.md").write_text(PAGE, encoding="utf-8")
    assert refresh_page(tmp_path) == ["passkey"]
    fresh = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "<!-- table: passkey -->\n| what | stood here before |\n<!-- end of table -->" in fresh
    assert (tmp_path / "tables/training.md").read_text(encoding="utf-8") in fresh


def test_no_page_is_made(results: Results, tmp_path: Path) -> None:
    write_tables(results, tmp_path / "tables")
    assert refresh_page(tmp_path) == []
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: passkey -->\nwithout an end\n", "must be followed by one"),
        ("<!-- end of table -->\n", "must be followed by one"),
        ("<!-- table: passkey -->\n<!-- table: training -->\n<!-- end of table -->\n", "must be followed by one"),
    ],
)
def test_mistakes_leave_the_page_alone(results: Results, tmp_path: Path, page: str, message: str) -> None:
    write_tables(results, tmp_path / "tables")
    path = tmp_path / "README.md"
    path.write_text(page, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        refresh_page(tmp_path)
    assert path.read_text(encoding="utf-8") == page
