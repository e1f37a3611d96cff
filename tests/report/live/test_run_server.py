"""The server of a run's page: what viewers get, whom it answers, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.oracle_model import packed_directory
from support.run_folder import run_folder, step_record, write_lines
from support.strategies import make
from treepack.report.live.page_address import PageAddress
from treepack.report.live.run_state import RunFolder
from treepack.report.live.server import ADDRESS, MAX_CONNECTIONS, RunServer
from treepack.report.live.watch import RunWatch, ViewerPlace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = [make(f"r{i}", [1, 2 + i, 3, 4], group="g", reward=i / 4) for i in range(4)]
    return run_folder(tmp_path / "run", packed=packed_directory(tmp_path / "packed", made, capacity=8))


def record(watch: RunWatch, step: int, **more: Any) -> dict[str, Any]:
    """Return the record of a step with the rows and tokens that it has."""
    assert watch.rows is not None
    rows = watch.rows.of_step(step)
    return step_record(step, num_rows=len(rows), tokens=int(watch.rows.num_tokens[rows].sum()), **more)


@pytest.fixture
def server(folder: Path) -> Iterator[RunServer]:
    watch = RunWatch(RunFolder(folder), text_limit=1000)
    write_lines(folder, [record(watch, 1)])
    made = RunServer(watch)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.stop()
    thread.join(20)
    assert not thread.is_alive()


def ask(server: RunServer, name: str, *, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    address = server.url.split("/")[2]
    connection = http.client.HTTPConnection(address, timeout=20)
    path = name if name.startswith("/") else f"/{server.token}/{name}"
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def event(response: http.client.HTTPResponse) -> tuple[str, str, Any]:
    """Return the id, the name and the content of the next event."""
    fields: dict[str, str] = {}
    while line := response.readline().decode().rstrip("\n"):
        name, _, value = line.partition(": ")
        fields[name] = value
    return fields.get("id", ""), fields.get("event", ""), json.loads(fields.get("data", "null"))


def test_a_viewer_gets_a_snapshot_then_steps_and_a_reset_after_a_resume(server: RunServer, folder: Path) -> None:
    viewer = ask(server, "events")
    _, name, first = event(viewer)
    while first["facts"]["last_step"] == 0:  # the poll that reads the first line may come later
        _, name, first = event(viewer)
    write_lines(folder, [record(server.watch, 2, loss=7.5)], mode="a")
    identity, name, second = event(viewer)
    assert (name, second["data"]["curve-0"]["points"]["training"]) == ("steps", [[2.0], [7.5]])
    # A viewer that was away gets what it missed; one of another server gets everything.
    write_lines(folder, [record(server.watch, 3)], mode="a")
    event(viewer)
    _, name, missed = event(ask(server, "events", **{"Last-Event-ID": identity}))
    assert (name, missed["data"]["curve-0"]["points"]["training"][0]) == ("steps", [3.0])
    assert event(ask(server, "events", **{"Last-Event-ID": f"other{identity}"}))[1] == "snapshot"
    # Also if both servers have the same address, because the page of a resumed run keeps it.
    assert not identity.startswith(server.token)
    (folder / "new").write_text(json.dumps(record(server.watch, 1)) + "\n")
    (folder / "new").replace(folder / "metrics.jsonl")
    _, name, reset = event(viewer)
    assert name == "reset"
    assert reset["facts"]["last_step"] == 1
    assert "The run was resumed after step 1." in reset["facts"]["notes"]


def test_the_end_of_the_server_is_the_last_event(folder: Path) -> None:
    write_lines(folder, [step_record(1)])
    server = RunServer(RunWatch(RunFolder(folder)))
    thread = threading.Thread(target=server.serve)
    thread.start()
    viewers = [ask(server, "events") for _ in range(3)]
    assert {event(viewer)[1] for viewer in viewers} == {"snapshot"}
    (folder / "new").write_text("{}")
    (folder / "new").replace(folder / "train.json")  # as a run does, so that no viewer is told of half a file
    server.stop()
    for viewer in viewers:
        _, name, content = event(viewer)
        assert (name, content["facts"]["kind"]) == ("steps", "finished")
        assert event(viewer)[1] == "end"
    thread.join(20)
    assert not thread.is_alive()


def test_rollouts_of_a_step_are_json_and_unknown_steps_one_sentence(server: RunServer) -> None:
    viewer = ask(server, "events")
    while event(viewer)[2]["facts"]["last_step"] == 0:
        pass
    answer = json.loads(ask(server, "rollouts").read())
    assert (answer["first"], answer["last"], answer["settings"]["text"]) == (1, 1, "ids")
    assert json.loads(ask(server, "rollouts?step=999").read())["last"] == 1  # not done yet: the newest one
    refused = ask(server, "rollouts?step=1;x")
    assert (refused.status, json.loads(refused.read())["error"]) == (400, "the step is not a number")


def test_only_this_machine_by_its_own_name_and_address_is_answered(server: RunServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert ask(server, "").status == 200
    assert ask(server, "", Host="localhost:8080").status == 200  # through a tunnel
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.1@evil.example"):
        refused = ask(server, "", Host=host)
        assert (refused.status, b"run" in refused.read()) == (421, False)
    for path in ("/", "/events", f"/{server.token[:-1]}/", f"/{server.token}x/", f"/{server.token}/../run.json"):
        assert ask(server, path).status == 404
    for name in ("run.json", "metrics.jsonl", "../../etc/passwd", "%2e%2e/run.json"):
        assert ask(server, name).status == 404


def test_every_odd_path_gets_an_answer_and_prints_nothing(
    server: RunServer, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [b"http://[", b"http://[::1", b"//[x]/", b"*", b"", b"/\x00", b"/\xff\xfe", b"?", b"/" + b"a" * 70_000]
    for path in paths:
        connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=20)
        connection.connect()
        connection.sock.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"nothing is here" in (answer := connection.sock.makefile("rb").read()) or b" 414 " in answer, path
        connection.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_but_get_is_answered(server: RunServer, method: str) -> None:
    assert ask(server, "", method=method).status == 501


def test_the_policy_forbids_inline_scripts_and_other_hosts(server: RunServer) -> None:
    for name in ("", "run.css", "run.js", "rollouts"):
        headers = ask(server, name).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["X-Content-Type-Options"], headers["Access-Control-Allow-Origin"]) == ("nosniff", None)
    page = ask(server, "").read().decode()
    assert "<script>" not in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_more_viewers_than_threads_are_sent_away_and_the_others_stay(server: RunServer) -> None:
    viewers = [ask(server, "events") for _ in range(MAX_CONNECTIONS)]
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(server, "")
    assert event(viewers[0])[1] == "snapshot"
    for viewer in viewers:
        viewer.close()


def test_slow_strangers_do_not_keep_the_owner_out(server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treepack.report.live.server.HEAD_SECONDS", 1.0)
    port = int(server.url.split("/")[2].partition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(MAX_CONNECTIONS)]
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.2):
            for stranger in strangers:
                with suppress(OSError):
                    stranger.send(b"G")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        # Every connection ends, although each gets a byte long before a timeout of one read.
        for stranger in strangers:
            with suppress(ConnectionError):
                assert stranger.recv(1000) == b""
        assert ask(server, "").status == 200
    finally:
        ended.set()
        thread.join()
        for stranger in strangers:
            stranger.close()


def test_a_request_in_pieces_is_answered(server: RunServer) -> None:
    port = int(server.url.split("/")[2].partition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as viewer:
        for piece in (b"GET /", server.token.encode(), b"/ HTTP/1.1\r\nHo", b"st: localhost\r\n", b"\r\n"):
            viewer.sendall(piece)
        assert viewer.recv(100).startswith(b"HTTP/1.0 200 ")


def kept_address(folder: Path) -> PageAddress:
    kept = PageAddress(folder)
    kept.write("http://127.0.0.1:4000/AAAAAAAAAAAAAAAAAAAAAA/")
    assert kept.read() == "http://127.0.0.1:4000/AAAAAAAAAAAAAAAAAAAAAA/"
    return kept


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o700 | 0o001])
def test_an_address_that_others_could_read_is_not_taken(tmp_path: Path, mode: int) -> None:
    kept = kept_address(tmp_path / "run")
    (tmp_path / ".run.page").chmod(mode)
    assert kept.read() == ""


def test_an_address_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_address(tmp_path / "run")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert kept.read() == ""


def test_an_address_that_is_not_text_a_folder_or_a_pipe_is_not_taken(tmp_path: Path) -> None:
    kept, path = kept_address(tmp_path / "run"), tmp_path / ".run.page"
    path.write_bytes(bytes(range(128, 256)) * 40)
    assert not ADDRESS.fullmatch(kept.read())
    path.unlink()
    os.mkfifo(path, 0o600)
    assert kept.read() == ""
    path.unlink()
    path.mkdir(0o700)
    assert kept.read() == ""


def test_a_viewer_far_behind_gets_everything_and_one_up_to_date_nothing(folder: Path) -> None:
    write_lines(folder, (step_record(step) for step in range(1, 6001)))
    watch = RunWatch(RunFolder(folder))
    message = watch.wait(ViewerPlace(1, 10), 0)
    assert message is not None
    assert message.event == "snapshot"
    assert watch.wait(message.place, 0) is None
    assert len(message.content) < 500_000


@pytest.mark.parametrize("removed_first", [False, True])
def test_another_run_in_the_same_directory_has_its_own_rollouts(
    folder: Path, tmp_path: Path, removed_first: bool
) -> None:
    watch = RunWatch(RunFolder(folder), text_limit=1000)
    write_lines(folder, [record(watch, 1)])
    watch.poll()
    before = watch.rollouts(1)
    shutil.rmtree(folder)
    if removed_first:
        watch.poll()
        assert watch.facts is not None
        assert watch.facts.kind == "waiting"
    others = [make(f"other{i}", [1, 30 + i, 3, 4], group="other") for i in range(4)]
    run_folder(folder, packed=packed_directory(tmp_path / "others", others, capacity=8))
    second = RunWatch(RunFolder(folder), text_limit=1000)
    write_lines(folder, [record(second, 1)])
    for each in (watch, second):
        each.poll()
    assert before != watch.rollouts(1) == second.rollouts(1)


def test_hostile_names_and_values_are_plain_short_texts(folder: Path) -> None:
    hostile = '</script><img src=x onerror="window.broken=1">\u202e\ud800' + "x" * 5000
    run = json.loads((folder / "run.json").read_text())
    run["model"] = hostile
    run["options"] |= {hostile: {"a": [hostile]}}
    (folder / "run.json").write_text(json.dumps(run))
    write_lines(folder, [step_record(1, **{"</script>\u202e": 1.0, "loss": float("nan")})])
    watch = RunWatch(RunFolder(folder))
    message = watch.wait(ViewerPlace(), 0)
    assert message is not None
    content = json.loads(message.content)
    texts = [text for line in content["facts"]["plan"] + content["facts"]["metrics"] for text in line]
    assert max(map(len, texts)) <= 300
    assert all(text.isprintable() for text in texts)
    assert any(text.startswith("</script>") for text in texts)
