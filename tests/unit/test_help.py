"""The help: commands by subject, options by group, and no command or option is left out."""

import re

import click
import pytest
from click.testing import CliRunner

from offbeat.cli import SECTIONS, main
from offbeat.settings import GROUPS, Settings

GROUPED = ("simulate", "serve", "compare", "reproduce", "work")


def help_of(*command: str) -> str:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def sections(text: str) -> dict[str, str]:
    """The text under every heading."""
    parts = re.split(r"^([A-Z][^\n]*):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_commands_are_listed_by_subject() -> None:
    shown = sections(help_of())
    assert [*shown][: 1 + len(SECTIONS)] == ["Options", *SECTIONS]
    for title, names in SECTIONS.items():
        assert tuple(re.findall(r"^  (\w+)", shown[title], re.MULTILINE)) == names
    assert all(re.search(rf"^  {name} ", help_of(), re.MULTILINE) for name in main.commands)


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_stands_under_one_heading(name: str) -> None:
    shown = help_of(name)
    options = [option for option in main.commands[name].params if isinstance(option, click.Option)]
    for option in options:
        assert len(re.findall(rf"^ .*{option.opts[0]}\b(?!-)", shown, re.MULTILINE)) >= 1, option.name
    assert {*sections(shown)} <= {"Options", *GROUPS.values(), "Device"}


def test_a_setting_stands_in_its_group() -> None:
    shown = sections(help_of("simulate"))
    assert [*shown] == ["Options", *GROUPS.values()]
    for name, field in Settings.__dataclass_fields__.items():
        assert f"--{name.replace('_', '-')}" in shown[GROUPS[field.metadata["group"]]], name
    served = sections(help_of("serve"))
    assert "--port" in served["Server"]
    assert "--access" in served["Server"]
    assert "--exit-when-finished" in served["End of the run"]


def test_every_command_and_option_says_what_it_is() -> None:
    for name, command in main.commands.items():
        assert command.get_short_help_str(1000).endswith("."), name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{name} {option.name}"
