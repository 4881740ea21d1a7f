"""Owns the steps of a rule as plain lists: how the ledger keeps what was done to vectors, to the last bit."""

import json
from typing import Any

from offbeat.core.rules import Answer, Larger, Mix, Move, OnParameters, Product, Root, Steps, VectorStep

_KINDS = {"move": Move, "product": Product, "larger": Larger, "root": Root}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def detail_of(answer: Steps) -> str:
    """What the `detail` of a decision's row says."""
    cache = {} if answer.cache is None else {"cache": int(answer.cache)}
    return json.dumps({"steps": steps_to(answer.steps), "closing": steps_to(answer.closing), **cache})


def answer_in(keep: float, new: float, base: float, publish: bool, detail: str | None) -> Answer:
    """The answer in a decision's row: its coefficients, and its `detail` where it has steps."""
    if detail is None:
        return Mix(keep, new, base, publish)
    said = json.loads(detail)
    return Steps(keep, new, base, publish, steps_from(said["steps"]), steps_from(said["closing"]), said.get("cache"))


def detail_of_closing(closing: tuple[VectorStep, ...]) -> str:
    """What the `detail` of a `group_closed` row says."""
    return json.dumps({"closing": steps_to(closing)})


def closing_in(detail: str | None) -> tuple[VectorStep, ...]:
    """What a rule did when its group was closed, in the `detail` of a `group_closed` row."""
    return () if detail is None else steps_from(json.loads(detail)["closing"])


def steps_to(steps: tuple[VectorStep, ...]) -> list[Any]:
    """Steps as lists that JSON can hold: the kind of a step, then its parts.

    >>> steps_to((Move("g", (("new", 0.5), ("base", -0.5))), OnParameters((Larger("v", "g"),))))
    [['move', 'g', [['new', 0.5], ['base', -0.5]]], ['on_parameters', [['larger', 'v', 'g']]]]
    """
    return [_step_to(step) for step in steps]


def steps_from(lists: list[Any]) -> tuple[VectorStep, ...]:
    """The steps that `steps_to` made these lists of."""
    return tuple(_step_from(*values) for values in lists)


def _step_to(step: VectorStep) -> list[Any]:
    if isinstance(step, OnParameters):
        return ["on_parameters", steps_to(step.steps)]
    if isinstance(step, Move):
        return ["move", step.into, [[name, float(coefficient)] for name, coefficient in step.terms]]
    return [_NAMES[type(step)], *(value if isinstance(value, str) else float(value) for value in step)]


def _step_from(kind: str, *parts: Any) -> VectorStep:
    if kind == "on_parameters":
        return OnParameters(steps_from(parts[0]))  # type: ignore[arg-type]
    if kind == "move":
        return Move(parts[0], tuple((name, coefficient) for name, coefficient in parts[1]))
    made: VectorStep = _KINDS[kind](*parts)
    return made
