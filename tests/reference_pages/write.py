"""`make reference`: write the reference pages and schemas that come from the code.

A test compares the committed files with what the code says now, and names this command.
"""

from __future__ import annotations

from pathlib import Path

from reference_pages.commands import commands_page
from reference_pages.configuration import keys_page, schema_files
from reference_pages.metrics import metrics_page
from reference_pages.python_api import python_page
from reference_pages.rows import rows_page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def written() -> dict[str, str]:
    """Return every generated file, by its path below docs/reference, with its text."""
    return {
        "config_keys.md": keys_page(),
        "cli.md": commands_page(),
        "python.md": python_page(),
        "metric_names.md": metrics_page(),
        "records.md": rows_page(),
        **{f"schemas/{name}": text for name, text in schema_files().items()},
    }


def main() -> None:
    """Write the files that differ, and print their paths."""
    for name, text in written().items():
        path = REFERENCE / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
