"""examples/fedasync_one_file.py: short, self-contained, it learns, and it is the oracle of the library's arithmetic."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.core.kernel import Term, Updater
from offbeat.core.layout import Vector, aligned
from offbeat.core.rules import Mix

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedasync_one_file.py"

STALENESS_FNS: list[tuple[str, tuple[float, ...]]] = [
    ("constant", ()),
    ("polynomial", (0.5,)),
    ("polynomial", (1,)),
    ("polynomial", (30,)),  # so small that float32 knows it as 0
    ("hinge", (10, 4)),
    ("hinge", (2.5, 0.5)),
    ("hinge", (1e6, 0)),
]
KERNELS = [
    pytest.param(False, id="numpy"),
    pytest.param(True, id="numba", marks=pytest.mark.skipif(not find_spec("numba"), reason="numba is not installed")),
]


def load_example() -> Any:
    spec = spec_from_file_location("fedasync_one_file", EXAMPLE)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def random_vector(rng: np.random.Generator, size: int) -> Vector:
    return rng.normal(size=size).astype(np.float32)


def schedule(seed: int, epochs: int) -> list[tuple[int, int]]:
    """(t, tau) of every epoch."""
    rng = np.random.default_rng(seed)
    return [
        (t, t - 1 - int(rng.integers(min(t, 4))) if rng.random() < 0.5 else int(rng.integers(t)))
        for t in range(1, epochs + 1)
    ]


def pushed(x_tau: Vector, noise: Vector) -> Vector:
    """An x_new that depends on every bit of x_tau, so that one wrong bit is carried on."""
    return np.float32(0.9) * x_tau + noise


def decide(rule: offbeat.Rule, t: int, tau: int) -> Mix:
    answer = rule.decide(offbeat.Facts(t=t, tau=tau), rule.memory)[0]
    assert isinstance(answer, Mix)
    return answer


def mixed(updater: Updater, x: Vector, *terms: Term) -> Vector:
    out = aligned(x.size)
    updater.mix(out, x, terms)
    return out


def test_it_is_short_and_needs_only_numpy() -> None:
    source = EXAMPLE.read_text("utf-8")
    assert len(source.splitlines()) <= 250
    nodes = list(ast.walk(ast.parse(source)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [f"{'.' * node.level}{node.module}" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert modules
    assert {name.split(".")[0] for name in modules} <= {"numpy", *sys.stdlib_module_names}


def test_as_a_script_it_prints_what_it_learns() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    start = float(re.search(r"F\(x_0\) = (\d+\.\d+)", output)[1])  # type: ignore[index]
    rows = [line.split() for line in output.splitlines() if re.fullmatch(r"( *[\d.]+){5}", line)]
    epochs, staleness = [int(row[0]) for row in rows], [int(row[2]) for row in rows]
    alphas, losses = [float(row[3]) for row in rows], [float(row[4]) for row in rows]
    assert all(before < after for before, after in pairwise(epochs))
    assert [float(row[1]) for row in rows] == sorted(float(row[1]) for row in rows)
    assert staleness[0] == 0
    assert max(staleness) > 3
    s = offbeat.polynomial(0.5)
    assert alphas == [round(0.6 * s(u), 4) for u in staleness]
    assert losses[-1] < losses[0] < start
    assert losses[-1] < start / 3
    ends = dict(re.findall(r"^(FedAsync|FedAvg).* updates, loss (\d+\.\d+)$", output, re.MULTILINE))
    assert float(ends["FedAsync"]) == losses[-1]
    assert losses[-1] < float(ends["FedAvg"]) < start


@pytest.mark.parametrize(("name", "numbers"), STALENESS_FNS)
def test_staleness_functions_agree_exactly(name: str, numbers: tuple[float, ...]) -> None:
    ours, theirs = getattr(offbeat, name)(*numbers), getattr(example, name)(*numbers)
    assert [theirs(u) for u in range(201)] == [ours(u) for u in range(201)]


def test_the_example_of_the_papers_remark_is_polynomial_1() -> None:
    s = offbeat.polynomial(1)
    assert [s(u) for u in range(201)] == pytest.approx([1 / (u + 1) for u in range(201)], rel=1e-15)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("size", [1, 7, 1000, 70_000])
@pytest.mark.parametrize("alpha", [1.0, 0.6, 1e-3])
@pytest.mark.parametrize(("name", "numbers"), STALENESS_FNS)
def test_every_version_has_the_same_bits(
    name: str, numbers: tuple[float, ...], alpha: float, size: int, compiled: bool
) -> None:
    rule, s = offbeat.fedasync(alpha, getattr(offbeat, name)(*numbers)), getattr(example, name)(*numbers)
    rng = np.random.default_rng(size)
    ours = theirs = [random_vector(rng, size)]
    with Updater(compiled=compiled) as updater:
        for t, tau in schedule(seed=size, epochs=12 if size == 70_000 else 60):
            noise = random_vector(rng, size)
            x_new = pushed(ours[tau], noise)
            ours = [*ours, mixed(updater, ours[-1], Term(decide(rule, t, tau), x_new))]
            x, alpha_t = example.updater(theirs[-1], pushed(theirs[tau], noise), tau, t, alpha, s)
            theirs = [*theirs, x]
            assert alpha_t == decide(rule, t, tau).new
            assert x.dtype == np.float32
            assert ours[-1].tobytes() == x.tobytes(), f"epoch {t}, tau {tau}"


@pytest.mark.parametrize("compiled", KERNELS)
def test_queued_updates_and_several_threads_have_the_same_bits(compiled: bool) -> None:
    rng = np.random.default_rng(5)
    x = start = random_vector(rng, 70_000)
    rule, s, queue = offbeat.fedasync(0.9, offbeat.hinge(10, 4)), example.hinge(10, 4), []
    for t, tau in schedule(seed=5, epochs=12):
        x_new = random_vector(rng, 70_000)
        queue.append(Term(decide(rule, t, tau), x_new))
        x, _ = example.updater(x, x_new, tau, t, 0.9, s)
    with Updater(threads=2, compiled=compiled) as updater:
        assert mixed(updater, start, *queue).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="numpy"),
        KERNELS[1],
    ],
)
def test_alpha_1_hands_x_new_over_bit_for_bit_with_its_signs_of_zero(compiled: bool) -> None:
    x_new = np.array([-0.0, 0.0, 1e-45, -3.5], np.float32)
    x, _ = example.updater(np.ones(4, np.float32), x_new, 0, 1, 1.0, example.constant())
    assert x.tobytes() == x_new.tobytes()
    term = Term(decide(offbeat.fedasync(1.0), 1, 0), x_new)
    with Updater(compiled=compiled) as updater:
        assert mixed(updater, np.ones(4, np.float32), term).tobytes() == x_new.tobytes()


@pytest.mark.parametrize("compiled", KERNELS)
def test_the_library_retraces_a_run_of_the_example(compiled: bool) -> None:
    run = example_run(seed=3, epochs=120)
    rule = offbeat.fedasync(0.6, offbeat.polynomial(0.5))
    x = np.zeros(example.FEATURES * example.CLASSES, np.float32)
    with Updater(compiled=compiled) as updater:
        for epoch in run:
            x = mixed(updater, x, Term(decide(rule, epoch.t, epoch.tau), epoch.x_new))
            assert x.tobytes() == epoch.x.tobytes(), f"epoch {epoch.t}"


def test_the_virtual_clock_is_deterministic_and_sound() -> None:
    run, again, other = (example_run(seed, epochs=120) for seed in (3, 3, 4))
    assert [(e.t, e.at, e.tau, e.x.tobytes()) for e in run] == [(e.t, e.at, e.tau, e.x.tobytes()) for e in again]
    assert run[-1].x.tobytes() != other[-1].x.tobytes()
    assert [e.t for e in run] == list(range(1, 121))
    assert all(before.at <= after.at for before, after in pairwise(run))
    assert all(0 <= e.tau < e.t and e.staleness == offbeat.Facts(t=e.t, tau=e.tau).staleness for e in run)
    assert max(e.staleness for e in run) > 0


def example_run(seed: int, epochs: int) -> list[Any]:
    x_0 = np.zeros(example.FEATURES * example.CLASSES, np.float32)
    devices, rng = example.make_devices(12, seed), np.random.default_rng(seed)
    settings = {"alpha": 0.6, "s": example.polynomial(0.5), "epochs": epochs}
    return list(example.server(x_0, devices, example.grad_f, example.Local(), rng, **settings))


def quadratic(size: int) -> tuple[Vector, Vector, Vector]:
    """A slope per coordinate, an optimum, and a start."""
    rng = np.random.default_rng(size)
    return rng.uniform(0.2, 2, size).astype(np.float32), random_vector(rng, size), random_vector(rng, size)


def test_the_worker_takes_the_step_of_the_paper() -> None:
    slope, optimum, x_tau = quadratic(50)
    data, local = example.Data(np.zeros((5, 1), np.float32), np.zeros(5, np.int64)), example.Local(0.13, 0.7, 9, 5)
    x_new = example.worker(x_tau, data, lambda x, _: slope * (x - optimum), local, np.random.default_rng(0))
    x = x_tau.astype(np.float64)
    for _ in range(9):
        x = x - 0.13 * (slope * (x - optimum) + 0.7 * (x - x_tau))
    np.testing.assert_allclose(x_new, x, rtol=0, atol=1e-6)
    assert x_new.dtype == np.float32


def test_the_worker_and_the_solver_agree() -> None:
    torch = pytest.importorskip("torch")
    from offbeat.train.sgd import take_step
    from offbeat.train.solver import Solver

    slope, optimum, x_tau = quadratic(50)
    data, local = example.Data(np.zeros((5, 1), np.float32), np.zeros(5, np.int64)), example.Local(0.13, 0.7, 9, 5)
    x_new = example.worker(x_tau, data, lambda x, _: slope * (x - optimum), local, np.random.default_rng(0))
    x = torch.from_numpy(x_tau.copy())
    for _ in range(9):
        gradients = torch.from_numpy(slope) * (x - torch.from_numpy(optimum))
        take_step(Solver(gamma=0.13, rho=0.7), x, gradients, torch.from_numpy(x_tau))
    np.testing.assert_allclose(x_new, x.numpy(), rtol=0, atol=1e-6)


def test_the_gradient_is_the_slope_of_the_objective() -> None:
    device = example.make_devices(2, seed=0)[0]
    rng = np.random.default_rng(0)
    x, direction = (random_vector(rng, example.FEATURES * example.CLASSES) for _ in range(2))
    step = np.float32(1e-2) * direction
    ends = [example.objective(x + sign * step, [device]) for sign in (1, -1)]
    slope = float(example.grad_f(x, device.data) @ direction)
    assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(slope, rel=1e-3)
