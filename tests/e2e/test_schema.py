"""schemathesis reads /openapi.json and calls every operation of a real server with valid and with invalid requests: no
answer is a 5xx or late, and each conforms to the description."""

from collections.abc import Callable
from typing import Any

import pytest

from pagewire.tools.servers import Server

schemathesis = pytest.importorskip("schemathesis", reason="make test-clients installs it")
from hypothesis import HealthCheck, given, settings, strategies  # noqa: E402
from schemathesis import Case  # noqa: E402
from schemathesis.checks import load_all_checks, not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.e2e
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    allow_header_conformance,
]  # fmt: skip
ANSWER_TIMEOUT_S = 20.0


@pytest.mark.parametrize("num_cases", [100, pytest.param(2000, marks=[pytest.mark.clients, pytest.mark.slow])])
def test_answers_conform_to_the_openapi_description(start: Callable[..., Server], num_cases: int) -> None:
    server = start("--max-model-len", "192").wait_ready()  # bounds the tokens that a case can request
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    right, wrong = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    cases = [operation.as_strategy(mode) for operation in operations if len(operation.body) for mode in (right, wrong)]
    cases.append(
        strategies.one_of([operation.as_strategy(right) for operation in operations if not len(operation.body)])
    )
    statuses: dict[tuple[str, int], int] = {}

    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.one_of(cases))
    def play(case: Case[Any]) -> None:
        response = case.call(base_url=server.url, timeout=ANSWER_TIMEOUT_S)
        key = case.operation.label, response.status_code
        statuses[key] = statuses.get(key, 0) + 1
        case.validate_response(response, checks=CHECKS)

    play()
    assert sum(statuses.values()) >= num_cases
    assert statuses["POST /v1/chat/completions", 200], statuses
    assert server.answers("/health")
