"""The files that a forge, an editor or a reviewer reads: they are well-formed, and what they name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import treepack
from support.makefile import targets
from support.paths import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
PAGES = [ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "benchmarks/README.md")]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(job, step) for job in read(workflow)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_triggers_rights_limits_and_pinned_actions(path: Path) -> None:
    workflow = read(path)
    # YAML 1.1 reads the key `on` as True.
    assert set(workflow[True]) == {"push", "pull_request"}
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
    for _, step in steps(path):
        assert ("run" in step) != ("uses" in step)
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_target_of_a_workflow_is_one_of_the_makefile(path: Path) -> None:
    named: list[str] = []
    for job, step in steps(path):
        for line in re.findall(r"^make (.+)$", step.get("run", ""), re.MULTILINE):
            words = [word for word in re.sub(r"\$\{\{ matrix\.target \}\}", "MATRIX", line).split() if "=" not in word]
            for word in words:
                named += job["strategy"]["matrix"]["target"] if word == "MATRIX" else [word]
    assert {"lint", "types", "imports", "test"} <= set(named) <= targets()


def test_the_workflow_runs_the_versions_of_python_that_the_package_supports() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [name.removeprefix("Programming Language :: Python :: ") for name in classifiers]
    versions = [name for name in named if re.fullmatch(r"3\.\d+", name)]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == versions
    assert set(jobs["data"]["strategy"]["matrix"]["os"]) == {"ubuntu-latest", "macos-latest"}
    assert jobs["macos"]["runs-on"] == "macos-latest"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_for_something_and_has_unique_ids(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all("label" in field["attributes"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 1


def test_there_is_a_form_for_errors_and_one_for_formats() -> None:
    assert {"bug.yml", "feature.yml", "format.yml"} == {path.name for path in FORMS}
    assert (GITHUB / "pull_request_template.md").read_text().count("- [ ]") >= 4


def test_the_paths_with_owners_exist() -> None:
    lines = [line for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line and not line.startswith("#")]
    paths = [line.split()[0] for line in lines]
    assert paths[0] == "*"
    assert [path for path in paths[1:] if not (ROOT / path.strip("/")).is_dir()] == []
    assert len(paths) > 10


def test_the_hooks_run_programs_of_the_development_install() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    requirements = " ".join(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    )
    packages = {"ruff": "ruff", "mypy": "mypy", "lint-imports": "import-linter"}
    programs = [hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in repository["hooks"]]
    assert programs == ["ruff", "ruff", "mypy", "lint-imports"]
    assert all(packages[program] in requirements for program in programs)


def test_the_citation_has_the_version_and_the_licence_of_the_package() -> None:
    citation = read(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == treepack.__version__
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_page_for_programs_is_one_page() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_links_and_scripts_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for line in re.findall(r"`make ([a-z][a-z0-9 -]*)`", text):
        assert set(line.split()) <= targets(), line
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    scripts = re.findall(r"`python ((?:docs|tools|benchmarks|sample_data|examples)/[\w/]+\.py)", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_the_editor_uses_the_line_length_of_ruff() -> None:
    length = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]
    assert f"\nmax_line_length = {length}\n" in (ROOT / ".editorconfig").read_text()
