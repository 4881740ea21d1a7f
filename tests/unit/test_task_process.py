"""The process with the task in it: what it answers, how it dies, and that it never outlives whoever started it."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.core.model_base import base_of
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting import child
from offbeat.hosting.loading import SHOWN_MAX, load
from offbeat.hosting.task_host import TaskDescription, TaskFailure, TaskHost, answer_to
from offbeat.hosting.task_process import TaskClosed, TaskDied, TaskFailed, TaskProcess
from offbeat.server.evaluator import Evaluator
from offbeat.settings import Settings
from offbeat.task import evaluate, start
from offbeat.wire import body_of, header_of, unpack

PATIENCE_S = 60.0
TASK = '''
import os, signal, sys, time
from pathlib import Path
import numpy as np
from offbeat.core.layout import Model
from offbeat.task import Trained

HERE = Path(__file__).parent
print("imported")


class Small:
    """Does what the first element of `do` says."""

    devices, gamma = np.int64(3), 0.25

    def initial(self, seed):
        with (HERE / "made").open("a") as made:
            made.write(".")
        w = np.random.default_rng(seed).standard_normal((5, 3)).astype(np.float32)
        return Model.of({"w": w, "same": w, "do": np.zeros(1, np.float32), "n": np.array([seed])}, buffers=["n"])

    def train(self, model, work):
        return Trained(1, 1)

    def evaluate(self, model):
        return getattr(self, DO[int(model["do"][0])])(model) or {"mean": float(model["w"].mean(dtype=np.float64))}

    def nothing(self, model):
        pass

    def talk(self, model):
        print("a line", flush=True)
        os.write(1, b"{}")
        os.system("echo from a process of its own")
        assert sys.stdin.readline() == ""

    def fail(self, model):
        return {"quotient": 1 / (model["do"] - model["do"]).sum().item()}

    def leave(self, model):
        sys.exit("enough")

    def vanish(self, model):
        os._exit(7)

    def crash(self, model):
        os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, model):
        (HERE / "begun").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)

    def resist(self, model):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.wait(model)

    def leave_behind(self, model):
        if not (pid := os.fork()):
            time.sleep(60)
            os._exit(0)
        (HERE / "behind").write_text(str(pid))
        os._exit(9)

    def tell(self, model):
        os.kill(os.getpid(), signal.SIGINT)
        return {"threads": int(os.environ["OMP_NUM_THREADS"]), "nice": os.nice(0), "nan": float("nan")}


DO = ("nothing", "talk", "fail", "leave", "vanish", "crash", "wait", "resist", "leave_behind", "tell")
task = Small()
'''
DO = ("nothing", "talk", "fail", "leave", "vanish", "crash", "wait", "resist", "leave_behind", "tell")


@pytest.fixture
def spec(tmp_path: Path) -> str:
    file = tmp_path / "small.py"
    file.write_text(TASK)
    return str(file)


@pytest.fixture
def process(spec: str) -> Iterator[TaskProcess]:
    made = TaskProcess(spec, Settings(seed=4))
    yield made
    made.close()


def small(do: str = "nothing", value: float = 1.0) -> Model:
    """A model of the small task that makes its evaluation do this."""
    w = np.full((5, 3), value, np.float32)
    arrays = {"w": w, "same": w, "do": np.array([DO.index(do)], np.float32), "n": np.array([0])}
    return Model.of(arrays, buffers=["n"])


def written(folder: Path, model: Model, name: str = "x") -> Path:
    file = folder / f"{name}.safetensors"
    file.write_bytes(header_of(model.layout) + b"".join(body_of(model)))
    return file


def until(condition: Callable[[], bool]) -> None:
    """Look again and again, for so long at most."""
    end = monotonic() + PATIENCE_S
    while not condition():
        assert monotonic() < end, "it did not happen"
        sleep(0.01)


def gone(pid: int) -> bool:
    """Is this process over, or a zombie that nobody has collected?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


class Call(threading.Thread):
    """Something that waits, on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except Exception as error:
            self.error = error

    def ended(self) -> Exception | None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.error


# --- what it answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "made"), [((4, 5), "..."), ((5, 4), "....")])
def test_it_tells_what_the_task_is_and_delivers_the_bits_of_x_0(
    process: TaskProcess, spec: str, tmp_path: Path, seeds: tuple[int, int], made: str
) -> None:
    task = load(spec, Settings())
    about = process.about()
    plain = TaskDescription(task.identity, 3, None, 0.25, None, False, ("mean",))  # type: ignore[attr-defined]
    assert about == replace(plain, base=base_of(small().layout, {}).digest)
    (tmp_path / "made").unlink()
    for seed in seeds:
        x_0, out = start(task, seed), tmp_path / f"{seed}.safetensors"
        layout = process.initial(seed, out)
        assert layout == x_0.layout
        assert out.read_bytes() == header_of(x_0.layout) + b"".join(body_of(x_0))
        assert process.evaluate(0, out) == evaluate(task, x_0)
    assert (tmp_path / "made").read_text() == made  # one less where that of seed 4, made at loading, comes first
    assert list(tmp_path.glob("*.aside")) == []


def test_a_task_may_print_and_read_and_start_what_it_likes(
    process: TaskProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert process.evaluate(1, written(tmp_path, small("talk"))) == {"mean": 1.0}
    assert process.evaluate(2, written(tmp_path, small(value=2.0))) == {"mean": 2.0}
    out, err = capfd.readouterr()
    assert out == ""
    for text in ("imported", "a line", "{}", "from a process of its own"):
        assert text in err


def test_what_goes_wrong_in_the_task_is_one_line_that_says_what_and_where_and_the_child_lives_on(
    process: TaskProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process.about()
    pid, line = (
        process.pid,
        TASK.splitlines().index('        return {"quotient": 1 / (model["do"] - model["do"]).sum().item()}'),
    )
    with pytest.raises(
        TaskFailed, match=rf"fails to evaluate: ZeroDivisionError: .* \(small.py:{line + 1}\)$"
    ) as failed:
        process.evaluate(1, written(tmp_path, small("fail")))
    assert "\n" not in str(failed.value)
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(TaskFailed, match="SystemExit: enough"):
        process.evaluate(1, written(tmp_path, small("leave")))
    assert process.evaluate(2, written(tmp_path, small())) == {"mean": 1.0}
    assert process.pid == pid


def test_a_file_that_is_no_model_of_the_task_is_refused_by_name(process: TaskProcess, tmp_path: Path) -> None:
    with pytest.raises(TaskFailed, match=r"other\.safetensors is no model of this task: 'w' is missing"):
        process.evaluate(1, written(tmp_path, Model.of({"v": np.ones(3, np.float32)}), "other"))
    with pytest.raises(TaskFailed, match="nowhere is no model of this task"):
        process.evaluate(1, tmp_path / "nowhere")
    with pytest.raises(TaskFailed, match=r"cannot write .* choose a folder"):
        process.initial(0, tmp_path / "no folder" / "x")


def test_a_task_that_cannot_be_loaded_says_why_and_is_tried_again(process: TaskProcess, spec: str) -> None:
    Path(spec).write_text("import numpy\n\nnumpy.nothing\n")
    with pytest.raises(TaskFailed, match=r"fails when it is imported: AttributeError: .* \(small.py:3\)$"):
        process.about()
    pid = process.pid
    Path(spec).unlink()
    with pytest.raises(TaskFailed, match="there is no file"):
        process.about()
    Path(spec).write_text(TASK)
    assert process.about().devices == 3
    assert process.pid == pid


def test_it_has_few_threads_and_goes_after_mixing_and_hears_no_ctrl_c(spec: str, tmp_path: Path) -> None:
    process = TaskProcess(spec, Settings(), threads=2)
    try:
        facts = process.evaluate(1, written(tmp_path, small("tell")))
        assert (facts["threads"], facts["nice"]) == (2, min(os.nice(0) + 5, 19))
        assert np.isnan(facts["nan"])
        assert process.pid is not None
        assert os.getpgid(process.pid) != os.getpgid(0)
    finally:
        process.close()
    with pytest.raises(InvalidValue, match="threads is 0"):
        TaskProcess(spec, Settings(), threads=0)


def test_a_path_is_meant_from_where_it_was_given(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = TaskProcess(Path(spec).name, Settings())
    try:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        process.initial(0, Path("x.safetensors"))
        assert (tmp_path / "elsewhere" / "x.safetensors").exists()
    finally:
        process.close()


def test_many_may_ask_and_each_gets_its_own_answer(process: TaskProcess, tmp_path: Path) -> None:
    files = [written(tmp_path, small(value=float(n)), str(n)) for n in range(8)]
    answers: dict[int, float] = {}

    def ask(n: int) -> None:
        for _ in range(5):
            answers[n] = process.evaluate(n, files[n])["mean"]

    calls = [Call(lambda n=n: ask(n)) for n in range(8)]  # type: ignore[misc]
    assert [call.ended() for call in calls] == [None] * 8
    assert answers == {n: float(n) for n in range(8)}


def test_a_built_in_task_gives_the_bits_that_it_gives_here(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    settings = Settings(devices=10, gamma=0.05, batch_norm="newest")
    task, process = load("digits", settings), TaskProcess("digits", settings)
    try:
        about, x_0 = process.about(), start(task, 7)
        plain = TaskDescription("digits", 10, None, 0.05, "newest", True, ("loss", "accuracy"))
        work = {name: getattr(task, name) for name in ("batch_size", "local_passes", "local_iterations")}
        assert about == replace(plain, base=base_of(x_0.layout, {}).digest, **work)
        assert process.initial(7, tmp_path / "x") == x_0.layout
        assert unpack((tmp_path / "x").read_bytes(), x_0.layout).vector.tobytes() == x_0.vector.tobytes()
        assert process.evaluate(0, tmp_path / "x") == evaluate(task, x_0)
    finally:
        process.close()


def test_the_server_imports_no_torch() -> None:
    modules = "offbeat.server.evaluator, offbeat.server.reports, offbeat.hosting.task_process"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# --- requests that no parent of ours would send ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "arguments", "why"),
    [
        ("nothing", (), "'TaskHost' object has no attribute 'nothing'"),
        ("load", (), "missing 1 required positional argument: 'payload'"),
        ("load", (b"not pickled",), "task nowhere fails to load: UnpicklingError"),
        ("load", (pickle.dumps((load, ("nothing", Settings()), {})),), "unknown task 'nothing'; use digits"),
        ("describe", (0,), "no task is loaded"),
        ("initial", (0, Path("x")), "no task is loaded"),
        ("evaluate", (Path("x"),), "no task is loaded"),
    ],
)
def test_a_bad_request_is_answered(verb: str, arguments: tuple[Any, ...], why: str) -> None:
    answer = answer_to(TaskHost(), verb, arguments, spec="nowhere")
    assert isinstance(answer, TaskFailure)
    assert why in answer.line


def test_an_error_is_not_endless_and_arrives_as_it_was_where_it_can(spec: str) -> None:
    Path(spec).write_text(f"raise RuntimeError('long ' * {SHOWN_MAX})")
    failed = answer_to(TaskHost(), "load", (pickle.dumps((load, (spec, Settings()), {})),), spec=spec)
    assert len(failed.line) < 1.1 * SHOWN_MAX
    assert isinstance(failed.error(), InvalidValue)
    assert isinstance(failed._replace(pickled=b"").error(), OffbeatError)


# --- how it dies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "how"),
    [("vanish", "ended with exit status 7"), ("crash", "was killed by SIGKILL, perhaps for want of memory")],
)
def test_a_child_that_dies_is_told_of_and_replaced(process: TaskProcess, tmp_path: Path, do: str, how: str) -> None:
    process.about()
    pids = [process.pid]
    with pytest.raises(TaskDied, match=how):
        process.evaluate(1, written(tmp_path, small(do)))
    pids.append(process.pid)
    assert process.evaluate(2, written(tmp_path, small())) == {"mean": 1.0}
    pids.append(process.pid)
    assert len(set(pids)) == 3
    assert pids[1] is None
    assert (tmp_path / "made").read_text() == "."  # the second child was told the layout


def test_a_child_that_died_while_nobody_asked_is_replaced_at_once(process: TaskProcess, tmp_path: Path) -> None:
    process.about()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: process.pid is None)
    assert process.evaluate(2, written(tmp_path, small())) == {"mean": 1.0}


def test_a_dead_child_is_noticed_though_one_of_its_own_holds_the_pipe(process: TaskProcess, tmp_path: Path) -> None:
    try:
        with pytest.raises(TaskDied, match="exit status 9"):
            process.evaluate(1, written(tmp_path, small("leave_behind")))
        assert not gone(int((tmp_path / "behind").read_text()))
    finally:
        os.kill(int((tmp_path / "behind").read_text()), signal.SIGKILL)


def test_a_task_that_was_changed_meanwhile_evaluates_nothing(process: TaskProcess, spec: str, tmp_path: Path) -> None:
    x = written(tmp_path, small())
    process.about()
    Path(spec).write_text(TASK + "\nCHANGED = True\n")
    assert process.evaluate(1, x) == {"mean": 1.0}  # the child has the old one
    with pytest.raises(TaskDied):
        process.evaluate(2, written(tmp_path, small("vanish"), "y"))
    with pytest.raises(TaskFailed, match="no longer what the run began with"):
        process.evaluate(3, x)
    Path(spec).write_text(TASK)
    assert process.evaluate(4, x) == {"mean": 1.0}


def test_a_run_that_goes_on_makes_no_x_0_and_takes_no_other_task(process: TaskProcess, tmp_path: Path) -> None:
    about = TaskDescription(load(process.spec, Settings()).identity, 3, None, 0.25, None, False, ("mean",))  # type: ignore[attr-defined]
    process.remember(about, small().layout)
    assert process.about() is about
    assert process.pid is None
    assert process.evaluate(8, written(tmp_path, small())) == {"mean": 1.0}
    assert not (tmp_path / "made").exists()
    other = TaskProcess(process.spec, Settings())
    other.remember(replace(about, identity="another"), small().layout)
    try:
        with pytest.raises(TaskFailed, match="no longer what the run began with"):
            other.evaluate(8, written(tmp_path, small()))
    finally:
        other.close()


def test_a_child_that_hangs_is_ended(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LOOK_S", 0.02)
    process = TaskProcess(spec, Settings(), evaluate_max_s=0.1)
    try:
        process.about()
        pid = process.pid
        with pytest.raises(TaskDied, match=r"took more than 0.1 s to evaluate"):
            process.evaluate(1, written(tmp_path, small("wait")))
        assert pid is not None
        assert gone(pid)
    finally:
        process.close()


@pytest.mark.parametrize("do", ["wait", "resist"])
def test_closing_ends_an_evaluation_that_is_under_way(
    process: TaskProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    monkeypatch.setattr(child, "END_S", 5.0 if do == "wait" else 0.2)
    call = Call(lambda: process.evaluate(1, written(tmp_path, small(do))))
    until((tmp_path / "begun").exists)
    pid, before = process.pid, monotonic()
    process.close()
    assert monotonic() - before < 4.0
    assert isinstance(call.ended(), TaskClosed)
    assert pid is not None
    assert gone(pid)
    process.close()
    with pytest.raises(TaskClosed, match="was closed; make another"):
        process.evaluate(2, tmp_path / "x.safetensors")


PARENT = """
import sys
from pathlib import Path
from offbeat.hosting.task_process import TaskProcess
from offbeat.settings import Settings

process = TaskProcess(sys.argv[1], Settings())
process.about()
print(process.pid, flush=True)
process.evaluate(1, Path(sys.argv[2]))
"""


def test_a_child_does_not_outlive_a_parent_that_is_killed(spec: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, spec, str(written(tmp_path, small("wait")))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until((tmp_path / "begun").exists)
        assert not gone(pid)
        parent.kill()
    try:
        until(lambda: gone(pid))
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


# --- with the evaluator ----------------------------------------------------------------------------------------------


def test_an_evaluation_that_kills_every_child_fails_after_three_and_the_next_one_succeeds(
    process: TaskProcess, tmp_path: Path
) -> None:
    done: list[tuple[int, Any]] = []
    failed: list[tuple[int, str]] = []
    evaluator = Evaluator(
        process,
        tmp_path,
        small().layout,
        lambda *call: done.append(call),
        lambda *call: failed.append(call),
        pause_s=0.01,
    )
    try:
        evaluator.put(1, small("vanish"))
        assert evaluator.wait(PATIENCE_S)
        evaluator.put(2, small("fail"))
        assert evaluator.wait(PATIENCE_S)
        evaluator.put(3, small(value=3.0))
        assert evaluator.wait(PATIENCE_S)
    finally:
        evaluator.stop()
    assert [t for t, _ in failed] == [1, 2]
    assert "ended with exit status 7 when asked to evaluate (try 3 of 3)" in failed[0][1]
    assert "ZeroDivisionError" in failed[1][1]
    assert done == [(3, {"mean": 3.0})]


def test_while_one_is_evaluated_the_newest_waits_and_stopping_leaves_nothing(
    process: TaskProcess, tmp_path: Path
) -> None:
    done: list[tuple[int, Any]] = []
    evaluator = Evaluator(process, tmp_path, small().layout, lambda *call: done.append(call), lambda *_: None)
    evaluator.put(1, small("wait"))
    until((tmp_path / "begun").exists)
    for t in range(2, 6):
        evaluator.put(t, small(value=float(t)), last=t == 4)
    assert not evaluator.wait(0)
    (tmp_path / "go").touch()
    assert evaluator.wait(PATIENCE_S)
    assert done == [(1, {"mean": 1.0}), (4, {"mean": 4.0})]
    (tmp_path / "go").unlink()
    (tmp_path / "begun").unlink()
    evaluator.put(6, small("wait"))
    until((tmp_path / "begun").exists)
    evaluator.stop()
    assert process.pid is None
    assert [t for t, _ in done] == [1, 4]
    assert not (tmp_path / "evaluating.safetensors").exists()
