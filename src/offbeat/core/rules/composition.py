"""Owns how one rule is made of parts: an aggregate, weights for its updates, and finishes for its versions.

A finish works on g, the step from the published version x to the next one. So an aggregate that mixes into w is written
anew, into g:  w = keep*w + new*x_new + base*x_tau  is, with w = x + g,

    g = new*x_new + base*x_tau + (keep - 1)*x + keep*g.

At a publication every finish takes g and leaves another g in its place, one after the other; then w = x + g, and g is
0 again. Where x_new equals x_tau the first two terms are exactly 0, which Adam would otherwise make much of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offbeat.core.rules.interface import (
    PUBLISHED,
    WORKING,
    Answer,
    Elementwise,
    Facts,
    Finisher,
    Larger,
    Memory,
    Move,
    OnParameters,
    Product,
    Publication,
    Root,
    Rule,
    Steps,
    VectorStep,
    Weight,
    elementwise,
    move,
    read_by,
)
from offbeat.errors import InvalidValue

STEP = "g"
LANDING: tuple[VectorStep, ...] = (move("w", x=1.0, g=1.0), Move(STEP, ()))
OF_FINISHES = "+ "
"""What finishes remember begins like this, so that an aggregate's memory is its own."""
STALENESS = f"{OF_FINISHES}staleness"


def compose(aggregate: Rule, *parts: Weight | Finisher) -> Rule:
    """One rule of an aggregate, weights and finishes, which work in the order in which they are given.

    >>> from offbeat.core.rules import fedbuff, momentum
    >>> compose(fedbuff(10), momentum(0.9)).spec
    'fedbuff(10, eta=1.0, polynomial:0.5) + momentum(0.9)'
    """
    weights = tuple(part for part in parts if isinstance(part, Weight))
    finishes = tuple(part for part in parts if isinstance(part, Finisher))
    if len(weights) + len(finishes) != len(parts):
        raise InvalidValue(f"a rule has one aggregate; what follows it are weights and finishes, not {parts!r}")
    if aggregate.finishes and finishes:
        raise InvalidValue(f"{aggregate.spec} has its finishes already; give all of them at once")
    weighted = replace(aggregate, weights=(*aggregate.weights, *weights)) if weights else aggregate
    if weights:
        finished = "".join(f" + {finish.spec}" for finish in aggregate.finishes)
        counted = " * ".join([aggregate.spec.removesuffix(finished), *(weight.spec for weight in weights)])
        weighted = replace(weighted, spec=counted + finished)
    return _finished(weighted, finishes) if finishes else weighted


def _finished(aggregate: Rule, finishes: tuple[Finisher, ...]) -> Rule:
    named = _names(finishes, aggregate.slots)
    slots = tuple(dict.fromkeys([*aggregate.slots, STEP, *(name for names in named for name in names.values())]))
    parts = list(zip(finishes, named, strict=True))

    def formula(facts: Facts, memory: Memory) -> tuple[Answer, Memory]:
        own, kept = _split(memory)
        answer, after = aggregate.formula(facts, own)
        staleness = max(int(kept[STALENESS]), facts.staleness)
        kept, closing = {**kept, STALENESS: staleness}, tuple[VectorStep, ...]()
        if answer.publish:
            closing, kept = _closing(parts, Publication(facts.t, staleness), kept)
        return _into_step(answer, closing), {**after, **kept}

    def close(t: int, memory: Memory) -> tuple[tuple[VectorStep, ...], Memory]:
        kept = _split(memory)[1]
        closing, kept = _closing(parts, Publication(t, int(kept[STALENESS])), kept)
        return closing, {**aggregate.memory, **kept}

    memory = {**aggregate.memory, STALENESS: 0}
    for number, finish in enumerate(finishes):
        memory |= {f"{_prefix(number)}{name}": value for name, value in finish.memory.items()}
    spec = " + ".join([aggregate.spec, *(finish.spec for finish in finishes)])
    return replace(aggregate, spec=spec, formula=formula, memory=memory, slots=slots, finishes=finishes, close=close)


def _split(memory: Memory) -> tuple[dict[str, float], dict[str, float]]:
    """What the aggregate remembers, and what its finishes do."""
    own, kept = dict[str, float](), dict[str, float]()
    for name, value in memory.items():
        (kept if name.startswith(OF_FINISHES) else own)[name] = value
    return own, kept


def _prefix(number: int) -> str:
    return f"{OF_FINISHES}{number}."


def _into_step(answer: Answer, closing: tuple[VectorStep, ...]) -> Steps:
    """What an aggregate answered, with its result in g."""
    if isinstance(answer, Steps):
        own = tuple(answer.closing)
        before = own[: -len(LANDING)] if own[-len(LANDING) :] == LANDING else own
        for step in before:
            _refuse_working(step)
        return answer._replace(steps=tuple(map(_relative, answer.steps)), closing=(*before, *closing))
    keep, new, base, publish = answer
    mixed = move(STEP, new=new, base=base, x=keep - 1.0, g=keep)
    return Steps(keep, new, base, publish, (mixed,), closing)


def _relative(step: VectorStep) -> VectorStep:
    """A step into w = x + ... as one into g = ..."""
    if isinstance(step, Move) and step.into == WORKING and step.terms[:1] == ((PUBLISHED, 1.0),):
        step = Move(STEP, step.terms[1:])
    _refuse_working(step)
    return step


def _refuse_working(step: VectorStep) -> None:
    """With finishes, w is x until the version is published."""
    if any(one.into == WORKING or WORKING in read_by(one) for one in elementwise((step,))):
        raise InvalidValue(
            f"a rule with finishes writes to {STEP!r}, or once to w = x + ..., and reads no w; it answered {step}"
        )


def _closing(
    parts: Sequence[tuple[Finisher, Mapping[str, str]]], published: Publication, kept: Memory
) -> tuple[tuple[VectorStep, ...], dict[str, float]]:
    """What the finishes do at a publication, and what they remember after it."""
    steps, after = list[Elementwise](), {**kept, STALENESS: 0}
    for number, (finish, names) in enumerate(parts):
        prefix = _prefix(number)
        own = {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
        made, own_after = finish.formula(published, own)
        steps += [renamed(step, names) for step in made]
        after |= {f"{prefix}{name}": value for name, value in own_after.items()}
    return (OnParameters(tuple(steps)), *LANDING), after


def _names(finishes: Sequence[Finisher], taken: Sequence[str]) -> list[dict[str, str]]:
    """What the slots of finishes are called in the rule: as they call them, with a number where that is taken."""
    used, found = {*taken, STEP}, list[dict[str, str]]()
    for number, finish in enumerate(finishes):
        found.append({})
        for name in finish.slots:
            free = f"{name}{number}" if number or name in used else name
            while free in used:
                free += "_"
            found[-1][name] = free
            used.add(free)
    return found


def renamed(step: Elementwise, names: Mapping[str, str]) -> Elementwise:
    def name(old: str) -> str:
        return names.get(old, old)

    match step:
        case Move():
            return Move(name(step.into), tuple((name(vector), coefficient) for vector, coefficient in step.terms))
        case Product():
            return Product(name(step.into), step.keep, step.share, name(step.left), name(step.right))
        case Larger():
            return Larger(name(step.into), name(step.of))
        case Root():
            return Root(name(step.into), step.step, name(step.over), name(step.under), step.eps)
