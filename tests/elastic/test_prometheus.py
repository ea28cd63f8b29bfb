"""Metrics for Prometheus, and the dashboard that is made of them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from coordinators import PATIENCE_S, Running, Talker, running, talking
from prometheus_client.parser import text_string_to_metric_families

from atoll.elastic.certs import SERVER_NAME
from atoll.elastic.prometheus import LABELLED, NAMES, ROWS, exposition

from .test_link import make_round, settle, wait_until
from .test_page import ask

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def run(tmp_path: Path):
    with running(tmp_path / "reef") as run:
        yield run


def test_a_scraper_with_a_token_to_watch_is_shown_the_run(run: Running) -> None:
    islands = [Talker(run.token(), number) for number in range(2)]
    with talking(*islands):
        settle(islands)
        make_round(islands, 1, "anchor-0", "anchor-1")
        wait_until(lambda: run.status()["round"] == 1)
        answer = ask(run, "GET", "/metrics", Authorization=f"Bearer {run.token_line('watch')}")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    told = samples(answer.text)
    assert told["atoll_round"] == [({"run": "reef"}, 1.0)]
    assert told["atoll_committed_tokens_total"] == [({"run": "reef"}, 20.0)]
    assert ({"run": "reef", "what": "joined"}, 2.0) in told["atoll_member_events_total"]
    seats = [labels["seat"] for labels, _ in told["atoll_island_tokens_per_second"]]
    assert seats == ["0", "1"]


@pytest.mark.parametrize("role", ["join"])
def test_an_island_is_not_shown_the_metrics(run: Running, role: str) -> None:
    assert ask(run, "GET", "/metrics", Authorization=run.token(role).bearer).status == 403


def test_no_secret_is_in_the_metrics(run: Running) -> None:
    token = run.token("watch")
    text = ask(run, "GET", "/metrics", Authorization=token.bearer).text
    assert token.secret not in text
    assert run.coordinator.address.fingerprint not in text


def test_names_of_islands_cannot_break_the_format(run: Running) -> None:
    island = Talker(run.token(), name='a"} 1\nfake_metric{x="\\')
    with talking(island):
        wait_until(lambda: run.status()["members"])
        told = samples(exposition(run.status()).decode())
    assert "fake_metric" not in told
    assert told["atoll_island_round"][0][0]["island"] == 'a"} 1?fake_metric{x="\\'


def test_a_scraper_can_trust_the_certificate_by_its_file(run: Running, tmp_path: Path) -> None:
    """As Prometheus does, given `ca_file` and `server_name`: the chain and the name are verified."""
    authority = ssl.create_default_context(cafile=str(tmp_path / "reef/coordinator/identity/certificate.pem"))
    with (
        socket.create_connection(("127.0.0.1", run.coordinator.address.port), timeout=PATIENCE_S) as plain,
        authority.wrap_socket(plain, server_hostname=SERVER_NAME) as secure,
    ):
        secure.sendall(f"GET /metrics HTTP/1.0\r\nAuthorization: {run.token('watch').bearer}\r\n\r\n".encode())
        answer = http.client.HTTPResponse(secure)
        answer.begin()
        assert answer.status == 200
        assert b"atoll_round" in answer.read()


def test_every_metric_of_the_dashboard_is_exported_with_its_labels() -> None:
    labels = {row.name: {"run"} for row in ROWS} | {table.name: {"run", *table.labels} for table in LABELLED}
    expressions = list(expressions_of(json.loads(DASHBOARD.read_text())))
    assert len(expressions) > 20
    for expression, legend in expressions:
        names = re.findall(r"atoll_\w+", expression)
        assert names
        for name in names:
            assert name in NAMES, f"{name} of {expression} is not exported"
            used = set(re.findall(r"(\w+)\s*=~?", expression)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
            assert used <= labels[name], f"{expression} ({legend}) uses labels that {name} has not"


def expressions_of(part: Any) -> Any:
    if isinstance(part, dict):
        if "expr" in part:
            yield part["expr"], part.get("legendFormat", "")
        if "definition" in part:
            yield part["definition"], ""
        for value in part.values():
            yield from expressions_of(value)
    if isinstance(part, list):
        for value in part:
            yield from expressions_of(value)


def test_panels_of_the_dashboard_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
