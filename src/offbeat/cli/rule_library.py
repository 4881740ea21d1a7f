"""Owns `offbeat rules`: what there is to choose from, what each keeps and costs, and where it comes from.

Everything that is shown is asked of the library: docstrings, signatures, and what the rules answer.
"""

import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from offbeat.cli.options import JSON
from offbeat.errors import InvalidValue

if TYPE_CHECKING:
    from offbeat.core.rules.costs import Cost, KeptVectors
    from offbeat.core.rules.library import Entry

WIDTH = 80
BEFORE_FINISHES = "fedbuff:10"
"""The rule that finishes are shown with."""
HEADINGS = {
    "rule": "Rules: what an update does to the model",
    "finish": "Finishes, behind a rule (here fedbuff:10): what becomes of a version's step",
    "weight": "Weights: how much an update counts",
    "average": "Averages: a mean of the versions, beside the newest",
}
EXAMPLES: dict[str, Callable[[str], str]] = {
    "rule": lambda spec: f"--rule {spec}",
    "finish": lambda spec: f"--rule '{BEFORE_FINISHES} + {spec}'",
    "weight": lambda spec: f"--rule delta --weights {spec}",
    "average": lambda spec: f"--rule fedasync --average {spec}",
}
LEGEND = """
keeps    vectors as long as the model, beside it; n: and one for every device
x_tau    yes: a version is kept until the tasks that started from it have ended
update   vectors read + written for an update that is gathered
version  the same for an update that publishes a version

offbeat rules NAME shows the formula and its numbers. docs/rules.md tells more.
"""


@click.command()
@click.argument("name", required=False)
@JSON
def rules(name: str | None, as_json: bool) -> None:
    """List mixing rules, or explain one.

    NAME is a rule, a finish, a weight or an average, for instance fedbuff.
    """
    if name is not None:
        described = explained(name)
        click.echo(json.dumps(described) if as_json else "\n".join(page(described)))
        return
    found = listed()
    click.echo(json.dumps(found) if as_json else "\n".join(table(found)) + LEGEND.rstrip())


def listed() -> dict[str, list[dict[str, Any]]]:
    """Every name of the library by its kind."""
    from offbeat.core.rules.library import KINDS

    return {kind: [_facts(kind, name, entry) for name, entry in entries.items()] for kind, entries in KINDS.items()}


def explained(name: str) -> dict[str, Any]:
    """One name of the library, with its formula and its numbers."""
    from offbeat.core.rules.library import KINDS

    wanted = name.partition(":")[0].strip().lower().replace("_", "-")
    known = {other: kind for kind, entries in KINDS.items() for other in entries}
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidValue(f"there is no rule {name!r}; {hint}`offbeat rules` lists all")
    kind = known[wanted]
    entry = KINDS[kind][wanted]
    text = (inspect.getdoc(entry.function) or "").partition(">>>")[0].strip()
    return _facts(kind, wanted, entry) | {"text": text, "numbers": list(_numbers(entry)), "settings": entry.settings}


def _facts(kind: str, name: str, entry: "Entry") -> dict[str, Any]:
    kept, cost = _kept_and_cost(kind, entry)
    return {
        "kind": kind,
        "name": name,
        "usage": entry.usage,
        "source": entry.source,
        "slots": kept.slots,
        "per_device": kept.caches is not None,
        "x_tau": kept.bases,
        "update": None if cost.update is None else cost.update._asdict(),
        "version": None if cost.version is None else cost.version._asdict(),
        "example": f"offbeat simulate digits {EXAMPLES[kind](entry.example)}",
    }


def _kept_and_cost(kind: str, entry: "Entry") -> "tuple[KeptVectors, Cost]":
    """What the entry's example keeps and costs; a weight is a number and costs nothing."""
    from offbeat.core.rules import costs, from_spec
    from offbeat.core.staleness import polynomial
    from offbeat.core.vectors import averaging

    if kind == "weight":
        return costs.KeptVectors(), costs.Cost(None, None)
    if kind == "average":
        return costs.KeptVectors(1), costs.Cost(None, costs.traffic(averaging(0.5, has_buffers=False)))
    spec = entry.example if kind == "rule" else f"{BEFORE_FINISHES} + {entry.example}"
    rule = from_spec(spec, 0.6, polynomial(0.5))
    kept = costs.kept_by(rule)
    return kept if kind == "rule" else kept._replace(bases=False), costs.cost_of(rule)


def _numbers(entry: "Entry") -> Iterator[dict[str, Any]]:
    """The parameters of a function that are numbers; those that have no word in the usage are for Python alone."""
    words = {word.lower() for word in re.findall(r"[A-Z][A-Z0-9_]*", entry.usage)}
    for parameter in inspect.signature(entry.function).parameters.values():
        name = parameter.name.rstrip("_")
        if name in entry.settings:
            continue
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        yield {"name": name, "required": required, "default": default, "python_only": name not in words}


# --- for people ------------------------------------------------------------------------------------------------------


def table(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield f"{'':46}{'keeps':>7}{'x_tau':>7}{'update':>9}{'version':>9}"
    for kind, entries in found.items():
        yield HEADINGS[kind]
        for facts in entries:
            update, version = (_traffic(facts[name]) for name in ("update", "version"))
            kept, bases = _kept(facts), "yes" if facts["x_tau"] else "-"
            yield f"  {facts['usage']:44}{kept:>7}{bases:>7}{update:>9}{version:>9}"
            yield f"      {facts['source']}"
        yield ""


def page(facts: dict[str, Any]) -> Iterator[str]:
    """All about one name."""
    yield f"{facts['usage']}  ({facts['kind']})"
    yield ""
    for paragraph in facts["text"].split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), WIDTH - 1)
        yield ""
    numbers = [_number(number) for number in facts["numbers"]]
    rows = [
        ("numbers", ", ".join(numbers) or "none"),
        ("settings", ", ".join(f"--{name.replace('_', '-')}" for name in facts["settings"])),
        ("keeps", _kept_in_words(facts)),
        ("costs", _cost_in_words(facts)),
        ("source", facts["source"]),
        ("example", facts["example"]),
    ]
    for title, text in rows:
        if text:
            yield textwrap.fill(f"{title:10}{text}", WIDTH - 1, subsequent_indent=" " * 10)


def _number(number: dict[str, Any]) -> str:
    """A number as Python would write it: eta=0.1."""
    default = number["default"]
    shown = "" if number["required"] else f"={default:g}" if isinstance(default, float) else f"={default}"
    return str(number["name"]) + shown + (" (in Python)" if number["python_only"] else "")


def _kept(facts: dict[str, Any]) -> str:
    parts = [str(facts["slots"])] if facts["slots"] else []
    return " + ".join([*parts, *(["n"] if facts["per_device"] else [])]) or "-"


def _kept_in_words(facts: dict[str, Any]) -> str:
    words = [f"{_vectors(facts['slots'])} as long as the model"] if facts["slots"] else []
    if facts["per_device"]:
        words.append("one for each of n devices")
    if facts["x_tau"]:
        words.append("versions that running tasks started from (x_tau)")
    return ", ".join(words) or "nothing beside the model"


def _traffic(cost: dict[str, int] | None) -> str:
    return "-" if cost is None else f"{cost['read']} + {cost['written']}"


def _cost_in_words(facts: dict[str, Any]) -> str:
    words = {"update": "an update that is gathered", "version": "one that publishes a version"}
    if facts["kind"] == "average":
        words["version"] = "a version"
    elif facts["update"] is None:
        words["version"] = "an update"
    told = [
        f"{_vectors(cost['read'])} read and {cost['written']} written for {text}"
        for name, text in words.items()
        if (cost := facts[name]) is not None
    ]
    behind = f", as {BEFORE_FINISHES} + {facts['name']}" if facts["kind"] == "finish" else ""
    return "; ".join(told) + behind if told else "nothing: a weight is a number"


def _vectors(count: int) -> str:
    return f"{count} vector{'' if count == 1 else 's'}"
