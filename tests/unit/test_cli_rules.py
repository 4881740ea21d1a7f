"""`offbeat rules`: every name of the library with what it keeps and costs, and one of them in full."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offbeat.cli import main
from offbeat.core import rules
from offbeat.core.rules import Rule
from offbeat.core.rules.costs import UPDATES, Cost, KeptVectors, Traffic, cost_of, kept_by
from offbeat.core.rules.library import KINDS
from offbeat.core.rules.trial import made_up
from offbeat.core.staleness import polynomial

NAMES = [name for entries in KINDS.values() for name in entries]
WIDTH = 80


def offbeat(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["rules", *arguments])


def shown(*arguments: str) -> str:
    result = offbeat(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def entries() -> Iterator[dict[str, Any]]:
    for kind, found in json.loads(shown("--json")).items():
        assert {facts["kind"] for facts in found} == {kind}
        yield from found


def test_the_list_has_every_name_with_its_usage_and_source() -> None:
    text = shown()
    for of_kind in KINDS.values():
        for entry in of_kind.values():
            assert f"  {entry.usage} " in text
            assert f"      {entry.source}\n" in text
    assert [facts["name"] for facts in entries()] == NAMES


def test_everything_fits_a_terminal() -> None:
    for name in (None, *NAMES):
        for line in shown(*[name] if name else []).splitlines():
            assert len(line) <= WIDTH, line
            assert line == line.rstrip()


def test_the_list_says_what_is_kept_and_read_and_written() -> None:
    def row(name: str) -> list[str]:
        found = re.search(rf"^  {name}\S* +(.*)$", shown(), re.MULTILINE)
        assert found is not None
        return re.split(r" {2,}", found[1])

    assert row("fedasync") == ["-", "-", "-", "2 + 1"]
    assert row("fedbuff") == ["-", "yes", "3 + 1", "3 + 1"]
    assert row("ca2fl") == ["3 + n", "yes", "5 + 3", "7 + 5"]
    assert row("momentum") == ["2", "-", "3 + 1", "5 + 3"]
    assert row("participation") == ["-"] * 4
    assert row("poly") == ["1", "-", "-", "2 + 1"]


@pytest.mark.parametrize("name", NAMES)
def test_one_name_is_explained_by_its_docstring_without_the_doctest(name: str) -> None:
    facts, text = json.loads(shown(name, "--json")), " ".join(shown(name).split())
    entry = next(of_kind[name] for of_kind in KINDS.values() if name in of_kind)
    assert ">>>" not in facts["text"]
    assert (entry.function.__doc__ or "").splitlines()[0] == facts["text"].splitlines()[0]
    for part in (facts["usage"], facts["source"], facts["example"], " ".join(facts["text"].split())):
        assert part in text


def test_numbers_come_with_their_defaults_and_settings_with_their_flags() -> None:
    assert "numbers   k, eta=1\nsettings  --staleness-fn\n" in shown("fedbuff")
    assert "numbers   m, eta=1, devices=None (in Python), groups=0\n" in shown("ca2fl")
    assert "settings  --alpha, --staleness-fn\n" in shown("delta")
    assert "numbers   lambda=0.04\n" in shown("dcasgd")
    assert "numbers   none\n" in shown("sgd")
    numbers = json.loads(shown("fadas", "--json"))["numbers"]
    assert [(number["name"], number["default"]) for number in numbers] == [("m", 5), ("eta", 0.001), ("free", 1.0)]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_in_a_usage_is_a_parameter(name: str) -> None:
    facts = json.loads(shown(name, "--json"))
    words = [word.lower() for word in re.findall(r"[A-Z][A-Z0-9_]*", facts["usage"])]
    assert words == [number["name"] for number in facts["numbers"] if not number["python_only"]]


def test_every_example_is_a_command_that_the_settings_take() -> None:
    from offbeat.method import method_of
    from offbeat.settings import Settings

    for facts in entries():
        flags = re.findall(r"--(\w+) (?:'([^']+)'|(\S+))", facts["example"])
        values = {name: quoted or plain for name, quoted, plain in flags}
        assert facts["example"].startswith("offbeat simulate digits --rule ")
        assert method_of(Settings(**values), object()).rule.spec


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("fedbuf", "did you mean fedbuff? "), ("momentun:0.9", "did you mean momentum? "), ("xyz", ""), ("", "")],
)
def test_an_unknown_name_is_one_line_with_the_nearest(wrong: str, near: str) -> None:
    result = offbeat(wrong)
    assert result.exit_code == 2
    assert result.output == f"Error: there is no rule {wrong!r}; {near}`offbeat rules` lists all\n"


@pytest.mark.parametrize("name", ["fedbuff:10", "FedBuff", "delay_adaptive"])
def test_a_name_may_be_written_as_in_settings_papers_or_python(name: str) -> None:
    assert shown(name) == shown({"delay_adaptive": "delay-adaptive"}.get(name, "fedbuff"))


def test_it_imports_neither_torch_nor_numba() -> None:
    program = "import sys; from offbeat.cli import main; main(['rules'], standalone_mode=False)\n"
    program += "print(*(name for name in ('torch', 'numba', 'matplotlib') if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


# --- costs are those of the answers ----------------------------------------------------------------------------------


def test_a_cost_is_the_largest_that_an_answer_has() -> None:
    assert cost_of(rules.nesterov(3)) == Cost(None, Traffic(5, 4))
    assert len({len(getattr(answer, "closing", ())) for answer in made_up(rules.nesterov(3))}) == 2


def test_measuring_an_update_reads_it_once_more() -> None:
    plain = rules.delta(0.5)
    measuring = Rule("measuring", plain.formula, needs_base=True, needs_distance=True)
    assert (cost_of(plain), cost_of(measuring)) == (Cost(None, Traffic(3, 1)), Cost(None, Traffic(5, 1)))
    assert cost_of(rules.asyncfeded()) == Cost(None, Traffic(7, 1))


def test_what_is_kept() -> None:
    assert kept_by(rules.fedasync(0.6)) == KeptVectors(0, None, bases=False)
    assert kept_by(rules.ca2fl(3)) == KeptVectors(3, 0, bases=True)
    assert kept_by(rules.ace(0.1, groups=8)) == KeptVectors(2, 8, bases=True)


def test_there_are_updates_enough_for_two_versions_of_every_example() -> None:
    for name, entry in KINDS["rule"].items():
        rule = rules.from_spec(entry.example, 0.6, polynomial(0.5))
        assert sum(answer.publish for answer in made_up(rule, UPDATES)) >= 2, name
