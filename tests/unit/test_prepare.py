"""The verb `prepare`: what it says of what was read, and of what was not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.world.running import hasten, run_here

ROW = '{"text": "the cat sat on the mat and looked about for a while"}\n'


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


def prepare(root: Path, *words: str, code: int = 0) -> list[str]:
    """Prepare the folder `text`; give what is said, without times and paths."""
    ended = run_here(
        "prepare", f"data.path={root / 'text'}", f"data.cache={root / 'cache'}", "batch.length=16", "batch.rows=4",
        "steps=10", *words,
    )  # fmt: skip
    assert (ended.code, ended.out.count("Traceback")) == (code, 0), ended
    shown = re.sub(re.escape(str(root)), "@", ended.out + ended.err)
    return [re.sub(r"/[0-9a-f]{32}", "/KEY", line) for line in shown.splitlines()]


def lay(root: Path, files: dict[str, str | bytes]) -> None:
    (root / "text").mkdir(exist_ok=True)
    for name, text in files.items():
        (root / "text" / name).write_bytes(text.encode() if isinstance(text, str) else text)


def test_it_says_what_was_read_and_what_was_not(tmp_path: Path) -> None:
    lay(tmp_path, {"a.jsonl": ROW * 9 + "\n" + '{"text": ""}\n' + '{"txt": "no"}\n', "b": b"\0", ".c": b"x"})
    said = prepare(tmp_path, "data.errors=skip", "data.holdout=0.2")
    assert "text: @/cache/KEY" in said
    begin = said.index("text: @/cache/KEY")
    assert said[begin:] == [
        "text: @/cache/KEY",
        "                1 file",
        "               10 documents",
        "              459 text bytes",
        "              470 tokens",
        "                1 empty document",
        "                8 documents seen before",
        "                1 skipped, binary, not text",
        "                1 skipped, blank line",
        "                1 skipped, hidden",
        "                1 skipped, text is missing",
        "                8 documents to train on, 3 held out (by tail)",
        "text: 23 rows of 16 a pass; 10 updates read it 1.71 times",
    ]


def test_the_second_time_nothing_is_built_and_the_same_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, {"a.txt": "some text " * 50})
    first = prepare(tmp_path)
    monkeypatch.setattr("lib.store.tokens._build", None)
    assert prepare(tmp_path) == first


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_it_says_how_much_is_padding(tmp_path: Path, mode: str) -> None:
    lay(tmp_path, {"a.jsonl": ROW * 40})
    # 52 ids a document: three rows of 16 and four ids, of which four fill a row, but for the last ones of a window.
    said = prepare(tmp_path, f"batch.mode={mode}", "data.holdout=0")
    wanted = {
        "pack": "text: 131 rows of 16 a pass; 10 updates read 30.5% of it; padding 0.76%",
        "pad": "text: 160 rows of 16 a pass; 10 updates read 25% of it; padding 18.75%",
    }
    assert said[-1] == wanted[mode]


@pytest.mark.parametrize(("size", "steps", "line"), [
    (17, 1, "text: 1 row of 16 a pass; 1 update reads it 3.76 times"),
    (200_000, 1, "text: 12,500 rows of 16 a pass; 1 update reads 0.032% of it"),
    (800_000, 1, "text: 50,000 rows of 16 a pass; 1 update reads less than 0.01% of it"),
])  # fmt: skip
def test_few_and_many_are_told_in_words(tmp_path: Path, size: int, steps: int, line: str) -> None:
    lay(tmp_path, {"a.txt": "x" * (size - 1)})
    said = prepare(tmp_path, "data.holdout=0", f"steps={steps}")
    assert said[-1] == line
    assert "                1 document" in said
    assert "                1 document to train on, 0 held out (by tail)" in said


def test_a_mixture_is_told_source_by_source(tmp_path: Path) -> None:
    lay(tmp_path, {"a.jsonl": ROW * 40, "b.txt": "text " * 100})
    words = [
        f"data.sources.{name}.path={tmp_path / 'text' / file}" for name, file in (("x", "a.jsonl"), ("y", "b.txt"))
    ]
    ended = run_here("prepare", f"data.cache={tmp_path / 'cache'}", "batch.length=16", "batch.rows=4", "steps=10",
                     "data.holdout=0", *words, "data.sources.y.weight=3")  # fmt: skip
    assert ended.code == 0, ended
    said = (ended.out + ended.err).splitlines()
    assert said[-2:] == [
        "x: 130 rows of 16 a pass; 10 updates read 6.15% of it",
        "y: 31 rows of 16 a pass; 10 updates read it 1.02 times",
    ]


def test_text_that_had_to_be_mended_is_said_to_be_other_text(tmp_path: Path) -> None:
    from tests.coders import byte_level

    lay(tmp_path, {"a.txt": b"the cat\xe9 sat " * 30})
    said = prepare(tmp_path, f"data.tokenizer={byte_level(tmp_path)}", "data.errors=replace", "data.holdout=0")
    assert (
        "              450 bytes that the ids stand for: this tokenizer changes its text, so bits per byte are of what it "
        "makes of it"
    ) in said
    assert "                1 bytes that are no UTF-8 replaced" in said


def test_of_conversations_it_is_not_said(tmp_path: Path) -> None:
    lay(tmp_path, {"a.jsonl": '{"prompt": "some question", "completion": "some answer"}\n' * 20})
    said = prepare(tmp_path, "data.template=chatml", "data.holdout=0")
    assert not any("changes its text" in line for line in said)
    assert "              480 text bytes" in said


@pytest.mark.parametrize(("files", "words", "message"), [
    ({"a.jsonl": ROW + "{\n"}, (),
     "@/text/a.jsonl:2:1: looks like pretty-printed JSON, must be one record a line; rewrite it with jq -c ."),
    ({"a.jsonl": "\n\n"}, ("data.holdout=0",),
     "1 file read: no document found (blank line: 2), must hold text; give more"),
    ({"a.txt": "\n\n"}, ("data.split=line",),
     "1 file read: no document found (blank line: 2), must hold text; give more"),
    ({"a.txt": "text", "b.txt": "more"}, ("data.holdout_by=document",),
     "data.holdout=0.01, by document: of 2 documents no text is held out; raise data.holdout, set it to 0, or give more text"),
])  # fmt: skip
def test_bad_text_is_one_line_that_names_it(
    tmp_path: Path, files: dict[str, str | bytes], words: tuple[str, ...], message: str
) -> None:
    lay(tmp_path, files)
    said = prepare(tmp_path, *words, code=3)
    assert said[-1].endswith(message)
