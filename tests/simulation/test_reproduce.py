"""Reproduction: which curves make which figure, what is run again, and what is left behind."""

from pathlib import Path

import pytest

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.reproduce import figures
from offbeat.reproduce.paper import As
from offbeat.reproduce.target_runs import CurveResults, run_target
from offbeat.reproduce.targets import SCALES, TARGETS, FigureCurve, PlacedCurve, ReproductionTarget, target
from offbeat.sim.run import StopRequested
from offbeat.storage.json_file import read_json

READINGS: tuple[As, ...] = ("text", "authors")
VALUES = {"devices": 10, "epochs": 20, "evaluate_every": 5, "executor": "inline", "device_model": "sampled:4"}


def small(*, seeds: tuple[int, ...] = (0, 1)) -> ReproductionTarget:
    curves = [FigureCurve(f"alpha {alpha}", "digits", {**VALUES, "alpha": alpha}, seeds) for alpha in (0.3, 0.9)]
    return ReproductionTarget(
        "small", "digits", "accuracy", (*curves, FigureCurve("again", "digits", curves[0].values, seeds))
    )


# --- what is run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_", READINGS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_made_of_settings_that_are_sound(name: str, scale: str, as_: As) -> None:
    made = target(name, scale, as_)
    assert made.curves
    for curve in made.curves:
        curve.settings(curve.seeds[0])
        assert curve.hash in curve.name
    for place in made.places:
        assert place.curve.hash in {curve.hash for curve in made.curves}


def test_the_figures_have_the_papers_lines() -> None:
    labels = [curve.label for curve in target("cifar-k16").curves]
    assert labels[:3] == ["SGD, batch 50", "SGD, batch 1000", "FedAvg, k 10"]
    assert labels[3:] == [f"FedAsync+{fn}, alpha {a}" for a in (0.6, 0.9) for fn in ("Const", "Poly", "Hinge")]
    fns = [curve.settings(0).staleness_fn for curve in target("cifar-k16").curves[3:6]]
    assert fns == ["constant", "polynomial:0.5", "hinge:10,4"]
    paper = target("staleness", "paper")
    assert {place.x for place in paper.places} == {2, 4, 6, 8, 12, 16, 20, 30, 40, 50}
    assert len(target("sensitivity", "paper").places) == 2 * 27
    assert len(target("sensitivity").places) == 2 * 7, "one setting changed at a time"


def test_text_and_authors_differ_where_the_table_says() -> None:
    text, authors = (target("cifar-k16", "paper", as_).curves for as_ in READINGS)
    mine, theirs = text[3].settings(0), authors[3].settings(0)
    assert (mine.rho, mine.weight_decay, mine.warm_up, mine.alpha_schedule) == (0.005, None, None, "constant")
    assert (theirs.rho, theirs.weight_decay, theirs.warm_up) == (0.05, 1e-4, "0,5,0.01")
    assert (theirs.alpha_schedule, theirs.batch_norm) == ("step:800,0.5", "newest")
    assert (text[2].settings(0).scheduler, authors[2].settings(0).scheduler) == ("random", "fair")
    assert authors[0].settings(0).warm_up is None, "one machine has no device 0"
    wiki = [target("wikitext-k16", "paper", as_).curves[4].settings(0) for as_ in READINGS]
    assert [(s.staleness_fn, s.rho) for s in wiki] == [("hinge:10,2", 0.0001), ("hinge:10,4", 0.0)]


def test_curves_are_shared_between_figures_and_where_hinge_is_const() -> None:
    four, sixteen = target("cifar-k4").curves, target("cifar-k16").curves
    assert [curve.hash for curve in four[:3]] == [curve.hash for curve in sixteen[:3]]
    assert four[3].hash == four[5].hash, "no staleness exceeds b = 4"
    assert len({curve.hash for curve in sixteen}) == 9


def test_equal_gradients() -> None:
    for name, h in (("cifar-k4", 10), ("wikitext-k4", 30)):
        curves = {curve.label: curve.settings(0) for curve in target(name, "paper").curves}
        epochs = curves["FedAsync+Poly, alpha 0.6" if h == 10 else "FedAsync+Poly, alpha 0.8"].epochs
        assert epochs is not None
        assert curves["FedAvg, k 10"].epochs == epochs // 10
        one_machine = curves["SGD, batch 50" if h == 10 else "SGD"]
        assert (one_machine.epochs, one_machine.local_iterations) == (epochs, h)


@pytest.mark.parametrize(
    ("name", "scale", "said"), [("cifar", "laptop", "cifar-k4"), ("clock", "huge", "smoke, laptop")]
)
def test_an_unknown_target_or_scale_is_refused_with_what_there_is(name: str, scale: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        target(name, scale)


# --- running ---------------------------------------------------------------------------------------------------------


def test_what_has_a_result_is_not_run_again(tmp_path: Path) -> None:
    results = CurveResults(tmp_path / "results")
    told: list[tuple[float, int]] = []

    def tell(done: float, count: int) -> None:
        told.append((done, count))

    run_target(small(), results, tmp_path / "work", processes=1, tell=tell)
    assert [told[0], told[-1]] == [(2, 6), (6, 6)], "two labels share their runs"
    files = sorted((tmp_path / "results" / "curves").iterdir())
    assert [file.suffix for file in files] == [".csv", ".json"] * 2
    points = results.points(small().curves[0])
    assert list(points) == [0, 1]
    assert [point.t for point in points[0]] == [0, 5, 10, 15, 20]
    before = [file.read_bytes() for file in files]
    told.clear()
    run_target(small(), results, tmp_path / "elsewhere", tell=tell)
    assert told == [(6, 6), (6, 6)]
    assert not (tmp_path / "elsewhere").exists()
    run_target(small(seeds=(0, 1, 2)), results, tmp_path / "elsewhere", processes=1)
    assert [folder.name for folder in (tmp_path / "elsewhere").glob("*/*")] == ["seed-2", "seed-2"]
    assert files[0].read_bytes().startswith(before[0])


def test_other_settings_are_another_curve(tmp_path: Path) -> None:
    results = CurveResults(tmp_path)
    curve = small().curves[0]
    other = FigureCurve(curve.label, curve.task, {**curve.values, "rho": 0.5}, (0,))
    run_target(
        ReproductionTarget("one", "", "accuracy", (FigureCurve("one", "digits", curve.values, (0,)),)),
        results,
        tmp_path / "work",
        processes=1,
    )
    assert results.points(curve)
    assert not results.points(other)
    assert curve.hash == FigureCurve("other label", "digits", curve.values, (5, 6)).hash


def test_a_stopped_reproduction_keeps_what_was_finished(tmp_path: Path) -> None:
    results = CurveResults(tmp_path)

    def stop(done: float, _count: int) -> None:
        if done >= 4:
            raise StopRequested

    with pytest.raises(StopRequested):
        run_target(small(), results, tmp_path / "work", processes=1, tell=stop)
    kept = sum(len(results.points(curve)) for curve in small().curves[:2])
    assert 1 <= kept < 4
    run_target(small(), results, tmp_path / "work", processes=1)
    assert sum(len(results.points(curve)) for curve in small().curves[:2]) == 4


def test_failures_are_told_and_the_others_kept(tmp_path: Path) -> None:
    good = FigureCurve("good", "digits", VALUES, (0,))
    bad = FigureCurve("bad", "digits", {**VALUES, "devices": 10**6}, (0,))
    with pytest.raises(OffbeatError, match=r"1 of 2 runs failed: .*training images"):
        run_target(
            ReproductionTarget("two", "", "accuracy", (good, bad)),
            CurveResults(tmp_path),
            tmp_path / "work",
            processes=1,
        )
    assert CurveResults(tmp_path).points(good)


# --- what is left behind ---------------------------------------------------------------------------------------------


def test_a_picture_numbers_and_a_summary_are_left(tmp_path: Path) -> None:
    results = CurveResults(tmp_path)
    run_target(small(), results, tmp_path / "work", processes=1)
    summary = figures.write(small(), results, tmp_path)
    assert summary == read_json(tmp_path / "small.json")
    first = summary["curves"][0]
    ends = [points[-1].metrics["accuracy"] for points in results.points(small().curves[0]).values()]
    assert first["mean"] == pytest.approx(sum(ends) / 2)
    assert (first["gradients"], first["seeds"]) == (200, 2)
    assert (tmp_path / "small.csv").read_text().splitlines()[0] == "label,mean,spread,best,gradients,seeds,wall_s"
    assert (tmp_path / "small.png").stat().st_size > 10_000
    assert (tmp_path / "small.svg").read_text().count("alpha 0.9") == 1


@pytest.mark.parametrize("kind", ["ends", "grid"])
def test_final_values_are_drawn_where_they_belong(kind: str, tmp_path: Path) -> None:
    results, curves = CurveResults(tmp_path), small().curves[:2]
    places = {
        "ends": (PlacedCurve("Const", 4, curves[0]), PlacedCurve("Const", 16, curves[1])),
        "grid": (PlacedCurve(4, (0.1, 0.2, 0.3), curves[0]), PlacedCurve(16, (0.1, 0.2, 0.3), curves[1])),
    }[kind]
    made = ReproductionTarget("ends", "digits", "accuracy", curves, kind, places=places)  # type: ignore[arg-type]
    run_target(made, results, tmp_path / "work", processes=1)
    labels = [row["label"] for row in figures.write(made, results, tmp_path)["curves"]]
    assert labels == (["Const 4", "Const 16"] if kind == "ends" else ["4 (0.1, 0.2, 0.3)", "16 (0.1, 0.2, 0.3)"])


def test_half_a_figure_can_be_drawn(tmp_path: Path) -> None:
    results = CurveResults(tmp_path)
    one = ReproductionTarget("one", "", "accuracy", small(seeds=(0,)).curves[:1])
    run_target(one, results, tmp_path / "work", processes=1)
    summary = figures.write(small(), results, tmp_path)
    assert [row["label"] for row in summary["curves"]] == ["alpha 0.3", "again"]
