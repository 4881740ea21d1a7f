"""The API document is the API: valid, complete, and what a live server does with whatever it allows or forbids."""

import json
from collections.abc import Iterator
from importlib import resources
from itertools import count
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from offbeat.server.app import ROUTES
from offbeat.server.refusals import KINDS
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import file_of, ones

DOCUMENT = json.loads((resources.files("offbeat.server") / "openapi.json").read_text())
METHODS = ("get", "post", "put", "delete", "patch", "head", "options", "trace")
OPERATIONS = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    if method in METHODS
}
REFUSALS = sorted({str(kind.status) for kind in KINDS.values() if kind.status < 500})
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}})
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=CONFIG)
EXAMPLES = [8, pytest.param(20, marks=pytest.mark.slow)]
OVER_AND_OVER = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
ENDLESS = "events"
"""It streams without end: tests/server/test_views.py asks for it by hand."""
NAMES = count()
Request = Case[Any]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    room = {"tasks_per_device": 1000, "in_flight_max": 8000, "epochs": 1_000_000, "bad_updates_max": 1_000_000}
    with serving(tmp_path_factory.mktemp("server"), room, {"poll_s": 0.05}) as running:
        yield running
        assert Worker(running, "last").work().status == 200


# --- the document ----------------------------------------------------------------------------------------------------


def test_it_is_valid_openapi() -> None:
    assert DOCUMENT["openapi"].startswith("3.1.")
    SCHEMA.validate()


def test_it_has_every_route_and_no_other() -> None:
    assert {(method, path) for method, path, _ in OPERATIONS.values()} == {(r.method, r.path) for r in ROUTES}


def test_every_call_has_a_name_of_its_own_and_a_summary() -> None:
    calls = [operation for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len({call["operationId"] for call in calls}) == len(calls)
    assert all(call["summary"].endswith((".", "?", "(admin).")) for call in calls)


def test_every_reference_leads_somewhere() -> None:
    for reference in references(DOCUMENT):
        found: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        assert found


def references(value: Any) -> Iterator[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for name, one in value.items() if isinstance(value, dict) else ():
        if name == "$ref":
            yield one
    for one in inner:
        yield from references(one)


def test_nothing_is_defined_that_nobody_uses() -> None:
    used = set(references(DOCUMENT))
    for kind in ("schemas", "responses"):
        assert {f"#/components/{kind}/{name}" for name in DOCUMENT["components"][kind]} <= used


def test_every_status_of_a_refusal_is_described() -> None:
    described = {status for _, _, operation in OPERATIONS.values() for status in operation["responses"]}
    statuses = {str(kind.status) for word, kind in KINDS.items() if word not in ("internal", "method_not_allowed")}
    assert statuses <= described


def test_every_call_that_needs_a_right_says_who_is_refused() -> None:
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        if route.right is None:
            assert operation["security"] == [{}]
        else:
            assert {"401", "403", "426"} <= set(operation["responses"])


def described(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of every object, parameter and header, by where it stands."""
    if isinstance(value, dict):
        for kind in ("properties", "headers"):
            yield from ((f"{name}/{field}", facts) for field, facts in value.get(kind, {}).items())
        yield from ((f"{name}/{facts['name']}", facts) for facts in value.get("parameters", ()))
        for key, inner in value.items():
            yield from described(inner, f"{name}/{key}")


def test_every_field_parameter_and_header_says_what_it_is() -> None:
    found = list(described(DOCUMENT))
    assert len(found) > 100
    assert [name for name, facts in found if not facts.get("description")] == []


def test_what_may_be_null_says_what_null_means() -> None:
    nullable = {name: facts for name, facts in described(DOCUMENT) if "null" in facts.get("type", ())}
    assert {"gamma", "local_iterations", "lease_s", "alpha_t", "device"} <= {n.rpartition("/")[2] for n in nullable}
    assert [name for name, facts in nullable.items() if "null" not in facts["description"]] == []


def test_joining_tells_the_settings_that_the_document_lists(running: Running) -> None:
    listed = DOCUMENT["components"]["schemas"]["Joined"]["properties"]["settings"]["properties"]
    assert set(listed) <= set(Worker(running, f"w{next(NAMES)}").joined["settings"])


def test_it_says_that_an_update_is_a_whole_model() -> None:
    for text in (DOCUMENT["info"]["description"], DOCUMENT["paths"]["/v1/tasks/{task}/update"]["put"]["description"]):
        assert "whole model x_new" in text
        assert "never a difference" in text


def test_every_part_of_a_path_is_a_parameter() -> None:
    for _, path, operation in OPERATIONS.values():
        named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}


def test_the_server_gives_it_out(running: Running) -> None:
    answer = running.call("GET", "/v1/openapi.json")
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.json == DOCUMENT


# --- the server keeps to it ------------------------------------------------------------------------------------------


class Fleet:
    """Workers and leases, made where an example has used the last one up."""

    def __init__(self, running: Running) -> None:
        self.running, self._worker = running, Worker(running, f"w{next(NAMES)}")

    def fill_in(self, case: Request) -> None:
        """Put what only a live worker knows into a request: its session, its number, its task."""
        wanted = {p["name"] for p in OPERATIONS[operation_id(case)][2].get("parameters", ())}
        if "Offbeat-Session" in wanted:
            worker, lease = self._alive()
            case.headers["Offbeat-Session"] = worker.session["Offbeat-Session"]
            case.path_parameters |= {"worker": worker.number} if "worker" in wanted else {}
            case.path_parameters |= {"task": lease["task"]} if "task" in wanted else {}
        elif "worker" in wanted:
            case.path_parameters["worker"] = 0
        elif "run" in wanted:
            case.path_parameters["run"] = self.running.status()["run"]

    def _alive(self) -> tuple[Worker, Any]:
        path = f"/v1/workers/{self._worker.number}/ask?wait_s=5"
        answer = self.running.call("POST", path, headers=self._worker.session)
        if answer.status != 200:
            self._worker = Worker(self.running, f"w{next(NAMES)}")
            return self._worker, self._worker.lease()
        return self._worker, answer.json["lease"]


def operation_id(case: Request) -> str:
    return str(case.operation.definition.raw["operationId"])


def operation_of(name: str) -> Any:
    method, path, _ = OPERATIONS[name]
    return SCHEMA[path][method]


def kept(case: Request, running: Running, session: requests.Session, *unchecked: Any) -> int:
    """What came of it is in the document, and no failure of the server's."""
    answer = case.call(base_url=running.url, session=session, timeout=30)
    assert answer.status_code < 500 or answer.status_code in (503, 507), answer.content
    case.validate_response(answer, excluded_checks=[*unchecked])
    return answer.status_code


MODES = [
    (name, mode)
    for name, (_, _, operation) in OPERATIONS.items()
    for mode in GenerationMode
    if name != ENDLESS and (mode.is_positive or {"parameters", "requestBody"} & set(operation))
]
"""There is nothing that could be wrong about a call without parameters."""
CHANCE = {
    "declare": {204, 400, 409},  # 1.0 for a whole number; the base of another model
    "join": {201, 400, 409, 426},  # likewise; a device beyond those of this run; another protocol
    "pull": {200, 206, 304, 404, 410, 416},
    "pull_of_run": {200, 206, 304, 404, 410, 416},
    "push": {200, 400, 404, 409, 413, 422},  # whatever the bytes, they are hardly ever a model; or of another run
    "heartbeat": {200, 410},
}
"""What may come of a request that the document allows, where that depends on the run."""


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_strangers_get_what_the_document_says(running: Running, name: str, mode: GenerationMode, examples: int) -> None:
    with requests.Session() as session:

        @settings(OVER_AND_OVER, max_examples=examples)
        @given(case=operation_of(name).as_strategy(mode))
        def tried(case: Request) -> None:
            kept(case, running, session, positive_data_acceptance)

        tried()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_workers_get_what_the_document_says(running: Running, name: str, mode: GenerationMode, examples: int) -> None:
    fleet = Fleet(running)
    with requests.Session() as session:

        @settings(OVER_AND_OVER, max_examples=examples)
        @given(case=operation_of(name).as_strategy(mode))
        def tried(case: Request) -> None:
            fleet.fill_in(case)
            status = kept(case, running, session, positive_data_acceptance, negative_data_rejection)
            if mode is GenerationMode.POSITIVE:
                assert status in CHANCE.get(name, {200, 204})

        tried()


def test_a_push_by_the_document_is_acknowledged_by_the_document(running: Running) -> None:
    worker = Worker(running, f"w{next(NAMES)}")
    task, data, operation = worker.lease()["task"], file_of(ones()), operation_of("push")
    for repeated in (False, True):
        case = operation.Case(
            path_parameters={"task": task},
            headers=worker.head(data),
            body=data,
            media_type="application/octet-stream",
        )
        answer = case.call(base_url=running.url)
        case.validate_response(answer)
        assert answer.json()["repeated"] is repeated


BOUNDS = [("holding", -1), ("holding", 2**70), ("device", -1), ("version", "x" * 101), ("task", "x" * 1001)]


@pytest.mark.parametrize(("field", "value"), BOUNDS)
def test_a_bound_of_the_document_is_one_of_the_server(running: Running, field: str, value: Any) -> None:
    """By hand: a worker that joins must say protocol 1, which chance never does."""
    answer = running.call("POST", "/v1/workers", {"name": "bound", "protocol": 1, field: value})
    assert (answer.status, answer.json["error"]) == (400, "bad_request")
