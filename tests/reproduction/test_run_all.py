"""The runner of the whole reproduction: jobs side by side until a deadline, and the list of all jobs."""

import argparse
import tarfile
import time
from pathlib import Path

import curves
import jobs
import pytest
import run_all
from jobs import Job, Limits, run_jobs
from mps import CONTROL, shared_gpu


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for logs, beside scripts that need no library."""
    (tmp_path / "good.py").write_text("import sys; print('good', *sys.argv[1:])")
    (tmp_path / "bad.py").write_text("raise ValueError('the reason')")
    (tmp_path / "endless.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    monkeypatch.setattr(jobs, "HERE", tmp_path)
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def run(work: list[Job], logs: Path, seconds: float = 60.0) -> dict[str, str]:
    ended = run_jobs(work, logs, Limits(2, time.monotonic() + seconds), {})
    return {name: each.state for name, each in ended.items()}


def test_a_failed_job_ends_no_other_and_only_what_is_missing_runs_again(
    scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = [
        Job("first", ["bad.py"]),
        Job("second", ["good.py", "word"]),
        Job("third", ["good.py"], needs="first"),
        Job("fourth", ["good.py"], needs="second"),
    ]
    reason = "not started, because first failed"
    assert run(work, scripts) == {"first": "failed with 1", "second": "done", "third": reason, "fourth": "done"}
    assert "Traceback" in (scripts / "first.log").read_text()
    assert jobs.last_line(scripts / "second.log") == "good word"
    assert "first failed with 1: ValueError: the reason" in capsys.readouterr().out
    (scripts.parent / "bad.py").write_text("")
    assert run(work, scripts) == {"first": "done", "second": "existed", "third": "done", "fourth": "existed"}


def test_a_job_whose_files_are_enough_is_not_run(scripts: Path) -> None:
    assert run([Job("only", ["bad.py"], is_enough=lambda: True)], scripts) == {"only": "existed"}


def test_the_deadline_ends_all_and_a_job_without_time_does_not_start(scripts: Path) -> None:
    work = [Job("one", ["endless.py"]), Job("two", ["endless.py"]), Job("three", ["good.py"])]
    begin = time.monotonic()
    states = run(work, scripts, seconds=1.0)
    assert time.monotonic() - begin < jobs.GRACE
    assert states == {
        "one": "ended by the deadline",
        "two": "ended by the deadline",
        "three": "not started, because no time was left",
    }
    assert run([Job("one", ["good.py"], has_share=True)], scripts, seconds=jobs.SHORTEST) == {
        "one": "not started, because no time was left"
    }


def test_waiting_jobs_share_the_time_that_is_left(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    work = [Job(f"{number}", ["good.py"], has_share=True) for number in range(9)]
    assert jobs._share(work, Limits(3, 200.0, last=10.0)) == pytest.approx(30.0)
    assert jobs._share(work[:2], Limits(3, 200.0, last=10.0)) == pytest.approx(90.0)


def options(out: Path, *words: str) -> argparse.Namespace:
    known = {"out": out, "minutes": 9.5, "seeds": [0, 1], "tasks": ["steps", "maze"], "device": None}
    return argparse.Namespace(**known, dry_run="dry" in words, tiny="tiny" in words)


@pytest.mark.parametrize("words", [(), ("dry",), ("tiny",)])
def test_every_job_comes_after_the_one_that_it_needs_and_every_arm_exists(tmp_path: Path, words: tuple[str]) -> None:
    work = run_all.all_jobs(options(tmp_path, *words))
    names = [job.name for job in work]
    assert len(set(names)) == len(names) == 1 + 2 + 2 + 2 * sum(len(arms) for _, _, arms in run_all.SETS)
    assert all(job.needs is None or job.needs in names[:number] for number, job in enumerate(work))
    assert {arm for _, _, arms in run_all.SETS for arm in arms} <= curves.ARMS.keys()
    assert not any(jobs.is_made(job, tmp_path) for job in work)


def test_an_archive_has_records_and_logs_and_no_weights(tmp_path: Path) -> None:
    for name in ("credit/a.jsonl", "logs/a.log", "policies/steps/model.safetensors", "credit/halves-steps.pt"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("text")
    keep = run_all.Archive(tmp_path / "out", tmp_path / "all.tar.gz", every=0.0)
    keep.write_sometimes()
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert archive.getnames() == ["credit/a.jsonl", "logs/a.log"]


def test_a_machine_without_mps_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_gpu(wanted=True) as environment:
        assert environment == {}
    assert f"there is no {CONTROL}" in capsys.readouterr().err
    (tmp_path / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / CONTROL).chmod(0o755)
    with shared_gpu(wanted=True) as environment:
        assert environment == {}
    assert "MPS: off, because" in capsys.readouterr().out
