"""The page of the rules: its programs run and print what it says, its table is counted, and no rule is left out."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.cli.rule_library import listed
from offbeat.core.rules.library import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MEGABYTES, DEVICES = 40, 100
"""Of one vector of 10 million parameters, and devices in the table."""


def rows() -> list[str]:
    """The table of the page, as it must be."""
    found = []
    for facts in (facts for entries in listed().values() for facts in entries if facts["kind"] != "weight"):
        slots, n = facts["slots"], DEVICES if facts["per_device"] else 0
        kept = " + ".join([*([str(slots)] if slots else []), *(["n"] if n else [])]) or "-"
        traffic = ["-" if (cost := facts[name]) is None else f"{cost['read']} + {cost['written']}" for name in COSTS]
        bases = "yes" if facts["x_tau"] else "-"
        found.append(f"| `{facts['name']}` | {kept} | {bases} | {' | '.join(traffic)} | {_size(slots + n)} |")
    return found


COSTS = ("update", "version")


def _size(vectors: int) -> str:
    megabytes = vectors * MEGABYTES
    return "-" if not vectors else f"{megabytes} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"


def test_the_table_is_counted() -> None:
    counted = PAGE.split("| | vectors | x_tau | update | version | memory |\n", 1)[1].split("\n\n", 1)[0]
    assert counted.splitlines()[1:] == rows()


def test_every_name_has_its_entry_with_its_usage() -> None:
    usages = {entry.usage for entries in KINDS.values() for entry in entries.values()}
    assert set(re.findall(r"^\*\*`([^`]+)`\*\*", PAGE, re.MULTILINE)) == usages


def test_the_programs_run_and_print_what_the_page_says() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    programs = [index for index, (language, _) in enumerate(BLOCKS) if language == "python"]
    assert len(programs) >= 2
    for index in programs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(BLOCKS[index][1], "rules.md", "exec"), {"__name__": "__main__"})  # noqa: S102 (our own page)
        assert BLOCKS[index + 1] == ("text", printed.getvalue())


def test_commands_on_the_page_are_understood() -> None:
    commands = [line for language, text in BLOCKS if language == "console" for line in text.splitlines()]
    assert any("offbeat rules" in command for command in commands)
    for command in commands:
        if "offbeat rules" in command:
            assert CliRunner().invoke(main, command.split()[2:]).exit_code == 0
