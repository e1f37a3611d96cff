"""Reports: their numbers against slow twins, their sentences, and their files."""

from __future__ import annotations

import base64
import fnmatch
import gzip
import json
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.command_line import Run
from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make, trajectories
from treepack.costs.model_cost import read_shape
from treepack.files.manifest import Provenance
from treepack.files.manifest_entries import TokenizerEntry
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.report import texts
from treepack.report.contents import read_contents
from treepack.report.figures import ReportSubject, histogram, measure, nice_edges, node_means, reward_by_node
from treepack.report.page import render_page
from treepack.report.parts import groups_of, rewards_of, trees_of
from treepack.report.pictures import PICTURES
from treepack.report.rebuilt import trie_of_rows
from treepack.report.roles import mark_roles
from treepack.report.segments import TRAINED, RoleSegments, segments_of
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.nodes import paths
from treepack.trie.store.trie_files import write_trie
from treepack.trie.trie import Trie, trajectories_of

SHAPE = read_shape("qwen3-8b")
SHARES = st.sampled_from(["all", "group", "none"])


def rollouts() -> list[Trajectory]:
    """Two groups of three; the second shares less; one rollout is a prefix of another."""
    # 1 +- 2 +- 3 4 +- 5      a0, and a2 ends at 4
    #   |    |      '- 6 7    a1
    #   |    '- 8             b0
    #   '- 9 +- 9 9           b1      12 tokens in the trie, 7 in a trie of either group alone
    #        '- 8             b2
    return [
        make("a0", [1, 2, 3, 4, 5], group="a", reward=1.0),
        make("a1", [1, 2, 3, 4, 6, 7], group="a", reward=0.0),
        make("a2", [1, 2, 3, 4], group="a", reward=1.0),
        make("b0", [1, 2, 8], group="b", reward=0.0, spans=[(1, 2, 1.0)]),
        make("b1", [1, 9, 9, 9], group="b", reward=0.0, spans=[(2, 4, 1.0)]),
        make("b2", [1, 9, 8], group="b", reward=0.0),
    ]


def page_of(trie: Trie) -> str:
    subject = ReportSubject("made", trie)
    return render_page(subject, measure(subject, SHAPE), read_contents(trie, None, limit=10**6))


def segments_without_roles(trie: Trie) -> RoleSegments:
    return segments_of(trie, mark_roles(trie, [], {}, texts.ids_as_text))


def block(page: str, name: str) -> bytes:
    match = re.search(rf'<script type="text/plain" id="data-{name}">([^<]*)</script>', page)
    assert match, name
    return gzip.decompress(base64.b64decode(match[1]))


@given(trajectories(), SHARES)
def test_a_group_has_the_tokens_of_the_trie_of_its_own_rollouts(made: list[Trajectory], share: str) -> None:
    trie = build_trie(made, share=share)
    members: dict[tuple[int | None, str], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories_of(trie):
        members[trajectory.step, str(trajectory.group_id)].append(trajectory)
    # The slow twin builds a trie of each group; within one group, "group" shares as much as "all".
    alone = sorted(
        (len(rollouts), t.tokens_flat, t.tokens_tree)
        for rollouts in members.values()
        for t in [build_trie(rollouts, share="none" if share == "none" else "all")]
    )
    parts = groups_of(trie)
    assert sorted(zip(parts.sizes.tolist(), parts.flat.tolist(), parts.tree.tolist(), strict=True)) == alone


@given(trajectories(), SHARES)
def test_trees_have_all_tokens_of_the_trie(made: list[Trajectory], share: str) -> None:
    trie = build_trie(made, share=share)
    parts = trees_of(trie)
    assert len(parts.names) == trie.num_trees
    tokens = np.bincount(trie.tree_id, weights=trie.node_length, minlength=trie.num_trees)
    assert parts.tree.tolist() == tokens.tolist()


@given(trajectories(), st.data())
def test_the_reward_of_a_node_is_the_mean_over_the_rollouts_through_it(
    made: list[Trajectory], data: st.DataObject
) -> None:
    trie = build_trie(made)
    rewards = np.array([data.draw(st.sampled_from([np.nan, 0.0, 0.5, 1.0])) for _ in range(trie.num_trajectories)])
    through: dict[int, list[float]] = defaultdict(list)
    # node_start [0, 3, 5], token 4 -> search gives 2 -> node 1
    for reward, path in zip(rewards.tolist(), paths(trie.end_node, trie.node_start, trie.depth), strict=True):
        for node in np.unique(np.searchsorted(trie.node_start, path, side="right") - 1).tolist():
            through[node] += [] if np.isnan(reward) else [reward]
    means = [float(np.mean(through[node])) if through[node] else np.nan for node in range(trie.num_nodes)]
    assert node_means(trie, rewards).tolist() == pytest.approx(means, nan_ok=True)


def test_every_node_is_in_one_cell_of_the_chart_of_rewards() -> None:
    trie = build_trie(rollouts())
    cells = reward_by_node(trie)
    assert sum(cell["nodes"] for cell in cells) == trie.num_nodes
    assert sum(cell["tokens"] for cell in cells) == trie.tokens_tree
    assert reward_by_node(build_trie([make("x", [1, 2, 3])])) == []


def test_equal_rewards_are_one_row_of_the_chart() -> None:
    made = [make(f"t{i}", [1, 2, 3 + i % 9, i], reward=0.1) for i in range(60)]
    cells = reward_by_node(build_trie(made))
    assert len({cell["reward_start"] for cell in cells}) == 1
    assert cells[0]["reward_end"] - cells[0]["reward_start"] == pytest.approx(1)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    edges = nice_edges(np.array(values))
    bars = histogram(np.array(values), edges)
    assert sum(bar["count"] for bar in bars) == len(values)
    assert edges[0] <= min(values)
    assert max(values) < edges[-1]
    # 24 are the aim; a width of 1, 2 or 5 times a power of ten and the rounded start give a few more or less.
    assert len(bars) <= 30


@given(trajectories(), st.integers(0, 60))
def test_nodes_keep_equally_many_first_tokens_within_the_limit(made: list[Trajectory], limit: int) -> None:
    trie = build_trie(made)
    result = texts.node_texts(trie, segments_without_roles(trie), texts.ids_as_text, limit=limit)
    nodes = [node for chunk in result.chunks for node in json.loads(chunk)]
    assert len(nodes) == trie.num_nodes
    kept = max(trie.node_length) if result.kept is None else result.kept
    for u, pieces in enumerate(nodes):
        tokens = trie.tokens[trie.node_start[u] : trie.node_start[u + 1]]
        assert "".join(pieces).split() == [str(token) for token in tokens[:kept]]
    shown = int(np.minimum(trie.node_length, kept).sum())
    assert shown <= limit or result.kept is None
    assert result.tokens_left_out == trie.tokens_tree - shown
    assert (result.kept is None) == (result.tokens_left_out == 0)


def test_tokens_that_any_rollout_trains_are_marked() -> None:
    trie = build_trie([make("a", [1, 2, 3, 4], spans=[(2, 3, 1.0)]), make("b", [1, 2, 3, 5], spans=[(3, 4, 1.0)])])
    (chunk,) = texts.node_texts(trie, segments_without_roles(trie), texts.ids_as_text, limit=100).chunks
    # a trains 3 of the shared node 1 2 3; b trains 5.
    assert json.loads(chunk) == [["1 2 ", "3 "], ["4 "], ["5 "]]
    assert [kind & TRAINED for kind in segments_without_roles(trie).kind.tolist()] == [0, TRAINED, 0, TRAINED]


def test_many_nodes_are_cut_into_chunks_with_known_first_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "CHUNK_CHARACTERS", 40)
    trie = build_trie([make(f"t{i}", [1, i, i, i, i]) for i in range(2, 30)])
    result = texts.node_texts(trie, segments_without_roles(trie), texts.ids_as_text, limit=10**6)
    sizes = [len(json.loads(chunk)) for chunk in result.chunks]
    assert len(sizes) > 5
    assert np.cumsum([0, *sizes]).tolist() == [*result.first_node, trie.num_nodes]


def test_text_that_is_decoded_in_parts_keeps_its_spaces() -> None:
    words = {"<unk>": 0, "\u2581a": 1, "\u2581the": 2, "\u2581cat": 3, "s": 4}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    assert backend.decode([2, 3]) == "the cat"  # the decoder drops the first space
    decode = texts.decoder_of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert decode([[2], [3, 4], []]) == [" the", " cats", ""]


def test_a_path_reads_as_the_text_that_was_encoded() -> None:
    tokenizer = load_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    text = "<|im_start|>user\nA caf\u00e9 costs 3 \u20ac.<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Two parts, as two nodes of one path; no character is split at 5.
    assert "".join(texts.decoder_of(tokenizer)([ids[:5], ids[5:]])) == text


@given(trajectories(steps=False))
def test_a_trie_built_from_rows_is_the_trie_they_were_packed_from(made: list[Trajectory]) -> None:
    trie = build_trie(made)
    rows = list(pack_rows(trie, plan_rows(trie, capacity=10)))
    rebuilt = trie_of_rows(rows)
    assert np.array_equal(rebuilt.tokens, trie.tokens)
    assert np.array_equal(rebuilt.end_node, trie.end_node)
    assert sorted(rebuilt.trajectories["group_id"].to_pylist()) == sorted(trie.trajectories["group_id"].to_pylist())


def test_rows_with_terms_give_back_rewards_and_what_each_rollout_trains() -> None:
    trie = build_trie(rollouts())
    rebuilt = trie_of_rows(pack_rows(trie, plan_rows(trie, capacity=8)))
    assert rewards_of(rebuilt).tolist() == rewards_of(trie).tolist()

    def spans(one: Trie) -> list[list[tuple[int, int]]]:
        return [[(s["start"], s["end"]) for s in row] for row in one.trajectories["trained"].to_pylist()]

    assert spans(rebuilt) == spans(trie)


def test_the_summary_has_the_numbers_of_the_rollouts() -> None:
    page = page_of(build_trie(rollouts())).replace("\N{NO-BREAK SPACE}", " ")
    assert "6 trajectories of token ids or plain text" in page
    assert "6 trajectories of 2 groups have 25 tokens." in page
    # 1 - 12 / 25 = 52 %
    assert "12 are left: 52.0 % of the tokens are repeats (POR)." in page
    assert "The pass rate of the rollouts is 33.3 %. In 1 of 2 groups all rollouts have the same reward" in page
    assert re.search(r"Tree training pays \d\.\dx in rows of 16,384 tokens\.", page)


def test_names_with_controls_of_direction_cannot_turn_the_words_after_them() -> None:
    page = page_of(build_trie([make("r\u202e0", [1, 2], group="a\u2066\x1b[1m")]))
    names = [json.loads(block(page, name)) for name in ("sample-ids", "groups-names", "rollout-labels")]
    assert names[:2] == [["r 0"], ["a  [1m"]]
    assert all(each.isprintable() for name in names for each in name)


def test_the_explorer_gets_the_trie_and_the_groups_as_they_are() -> None:
    trie = build_trie(rollouts())
    page = page_of(trie)
    size, up = (np.frombuffer(block(page, name), "<u4") for name in ("forest-size", "forest-up"))
    assert size.tolist() == trie.node_length.tolist()
    assert [i - u if u else -1 for i, u in enumerate(up.tolist())] == trie.parent.tolist()
    ends = np.cumsum(np.frombuffer(block(page, "sample-end"), "<u4"))
    assert ends.tolist() == trie.end_node.tolist()
    assert json.loads(block(page, "sample-ids")) == trie.trajectories["trajectory_id"].to_pylist()
    assert json.loads(block(page, "groups-names")) == ["a", "b"]
    assert np.frombuffer(block(page, "groups-tree"), "<f8").tolist() == [7.0, 7.0]


def test_a_page_loads_nothing_and_has_no_markup_of_a_rollout() -> None:
    # Ids, groups and counts contain it. Ids and groups are in compressed blocks; the others are escaped on the page.
    nasty = '</script><script>alert(1)</script><img src="x" onerror="alert(2)">'
    trie = build_trie([make(nasty, [1, 2, 3], group=nasty), make("b", [1, 2], group=nasty)])
    subject = ReportSubject(nasty, trie, counts={nasty: 1})
    page = render_page(subject, measure(subject, SHAPE), read_contents(subject.trie, None, limit=None))
    assert "alert(" not in page.replace("&lt;script&gt;alert(1)", "").replace("onerror=&#34;alert(2)", "")
    tags = re.findall(r"<(?:script|link|img|iframe|object|use|image)\b[^>]*>", page)
    assert len(tags) > 10
    assert [tag for tag in tags if re.search(r"""(src|href)=(?!["']data:)""", tag)] == []
    assert "@import" not in page
    assert set(re.findall(r"url\([^)]*\)", page)) == {"url(#hatch)"}  # a pattern of the page itself
    assert "default-src 'none'" in page


@pytest.mark.slow
def test_equal_input_gives_equal_bytes_in_whatever_order_it_comes(tmp_path: Path, treepack: Run) -> None:
    records = [json.loads(line) for line in (ROOT / "sample_data" / "tokens.jsonl").read_text().splitlines()[:12]]
    lines = [json.dumps(record | {"rollout_id": f"r{i}"}) for i, record in enumerate(records)]
    for name, order in (("x", lines), ("y", lines[::-1])):
        (tmp_path / name).mkdir()
        source, page, png = tmp_path / name / "in.jsonl", tmp_path / f"{name}.html", tmp_path / f"{name}-png"
        source.write_text("\n".join(order))
        done = treepack("report", source, "--out", page, "--png", png)
        assert done.status == 0, done.err
    assert (tmp_path / "x.html").read_bytes() == (tmp_path / "y.html").read_bytes()
    written = sorted(path.name for path in (tmp_path / "x-png").iterdir())
    # Rollouts without rewards have no picture of rewards.
    assert set(written) <= set(PICTURES)
    assert len(written) >= 7
    for name in written:
        assert (tmp_path / "x-png" / name).read_bytes() == (tmp_path / "y-png" / name).read_bytes(), name


def test_a_packed_directory_is_shown_with_its_rows_and_with_its_trie_or_a_rebuilt_one(
    tmp_path: Path, treepack: Run
) -> None:
    treepack("build-trie", ROOT / "sample_data" / "tokens.jsonl", "--out", tmp_path / "trie")
    treepack("pack", tmp_path / "trie", "--capacity", 2048, "--out", tmp_path / "packed")
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    err = f"{100 * manifest['totals']['err']:.1f}\N{NO-BREAK SPACE}% are saved (ERR)"
    pages = []
    for name in ("original", "rebuilt"):
        done = treepack("report", tmp_path / "packed", "--no-text", "--out", tmp_path / f"{name}.html")
        assert done.status == 0, done.err
        pages.append((tmp_path / f"{name}.html").read_text())
        if name == "original":
            (tmp_path / "trie").rename(tmp_path / "elsewhere")
    assert [err in page for page in pages] == [True, True]
    assert ["rebuilt from the rows" in page for page in pages] == [False, True]
    assert block(pages[0], "forest-size") == block(pages[1], "forest-size")
    assert block(pages[0], "sample-reward") == block(pages[1], "sample-reward")


def test_text_is_optional_and_left_out_tokens_are_counted(tmp_path: Path, treepack: Run) -> None:
    source, pages = tmp_path / "in.jsonl", {}
    source.write_text("".join((ROOT / "sample_data" / "chat.jsonl").open().readlines()[:3]))
    wanted: dict[str, list[object]] = {"all": [], "none": ["--no-text"], "some": ["--text-limit", 2000]}
    for name, options in wanted.items():
        arguments = (source, "--tokenizer", ROOT / "sample_data" / "tokenizer", *options)
        done = treepack("report", *arguments, "--out", tmp_path / f"{name}.html")
        assert done.status == 0, done.err
        pages[name] = (tmp_path / f"{name}.html").read_text()
    assert "You are the desk agent" in block(pages["all"], "text-0").decode()
    assert "data-text-" not in pages["none"]
    assert "This page contains no text (--no-text)." in pages["none"]
    note = re.search(r"The page contains the first (\d+) tokens of each node: [\d,]+ are left out", pages["some"])
    assert note
    assert int(note[1]) > 0
    assert "are left out" not in pages["all"]


def test_token_ids_replace_text_if_no_tokenizer_is_known(tmp_path: Path, treepack: Run) -> None:
    done = treepack("report", ROOT / "sample_data" / "tokens.jsonl", "--out", tmp_path / "page.html")
    assert "token ids, because there is no tokenizer" in done.out
    page = (tmp_path / "page.html").read_text()
    assert "The page shows token ids, not text" in page
    assert re.fullmatch(r"[\d ]+", "".join(json.loads(block(page, "text-0"))[0]))


def test_another_tokenizer_than_that_of_the_directory_is_refused(tmp_path: Path, treepack: Run) -> None:
    trie = build_trie(rollouts())
    (tmp_path / "trie").mkdir()
    known: TokenizerEntry = {"name": "gone", "vocab_size": 9, "sha256": "0"}
    totals = measure(ReportSubject("made", trie), SHAPE).totals
    write_trie(trie, tmp_path / "trie", Provenance(tokenizer=known, totals=totals))
    done = treepack(
        "report", tmp_path / "trie", "--tokenizer", ROOT / "sample_data" / "tokenizer", "--out", tmp_path / "page.html"
    )
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert "is another tokenizer than gone, which" in done.err


def test_existing_outputs_are_refused_and_only_reports_are_replaced(tmp_path: Path, treepack: Run) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes((ROOT / "sample_data" / "tokens.jsonl").read_bytes()[:12_000].rpartition(b"\n")[0])
    out = tmp_path / "page.html"
    assert treepack("report", source, "--out", out).status == 0
    done = treepack("report", source, "--out", out)
    assert (done.status, done.err) == (1, f"treepack: {out} exists; choose another --out or give --overwrite\n")
    assert treepack("report", source, "--out", out, "--overwrite").status == 0
    out.write_text("<html>mine</html>")
    done = treepack("report", source, "--out", out, "--overwrite")
    assert "was not written by treepack" in done.err
    assert out.read_text() == "<html>mine</html>"
    done = treepack("report", source, "--out", source, "--overwrite")
    assert "is or lies inside the input" in done.err
    assert treepack("report", source).status == 2


@pytest.mark.parametrize(("module", "option"), [("vl_convert", "--out"), ("vl_convert", "--png")])
def test_without_the_extra_one_sentence_names_it(
    tmp_path: Path, treepack: Run, monkeypatch: pytest.MonkeyPatch, module: str, option: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import of the module now raises ImportError
    done = treepack("report", ROOT / "sample_data" / "tokens.jsonl", option, tmp_path / "out")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert re.search(r"run pip install .*'vl-convert-python>=[\d.]+'\n$", done.err)
    assert list(tmp_path.rglob("*")) == []


def test_a_capacity_leaves_out_and_counts_longer_rollouts() -> None:
    figures = measure(ReportSubject("made", build_trie(rollouts())), SHAPE, capacities=[5, 8])
    assert [(point["capacity"], point["num_too_long"]) for point in figures.capacities] == [(5, 1), (8, 0)]
    assert "no trajectory fits" in refusal(
        measure, ReportSubject("made", build_trie(rollouts())), SHAPE, capacities=[1]
    )


def page_files() -> list[Path]:
    folder = ROOT / "treepack" / "report"
    return [path for path in folder.rglob("*") if path.suffix in (".js", ".css", ".html")]


def test_the_files_of_the_page_are_shipped_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert len(page_files()) == 14
    for path in page_files():
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert package in settings["packages"]
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in settings["package-data"][package]), path


def test_scripts_and_styles_are_short() -> None:
    for path in page_files():
        assert len(path.read_text().splitlines()) < 400, path.name
