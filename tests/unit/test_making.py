"""From settings to how files become ids, and to the words that a run keeps of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lib.config import Config, Data, Source, sources_of
from lib.data.bytes import BYTES
from lib.data.chat import TEMPLATES, Template
from lib.run.making import making_of, reading_words
from lib.store.making import Making, ids_dtype
from lib.store.record import Reading


def made(data: Data, name: str = "text") -> Making:
    return making_of(data, sources_of(data)[name])


def test_the_defaults_are_the_defaults() -> None:
    assert made(Data()) == Making()
    assert Making().coder().tokenizer == BYTES
    assert reading_words(Config()) == {"text": ""}


def test_every_setting_arrives() -> None:
    data = Data(
        format="jsonl", split="line", text_key="t", id_key="i", dtype="<u2", template="chatml", train_on="last",
        errors="skip", tokenizer="a.json", eos_token="</s>", bos_token="<s>", add_bos=True, add_eos=False,
    )  # fmt: skip
    reading = Reading("jsonl", "line", "t", "i", "<u2", chat=True, errors="skip")
    assert made(data) == Making(reading, "a.json", "</s>", "<s>", True, False, TEMPLATES["chatml"], "last")
    words = "format=jsonl split=line text_key=t id_key=i dtype=<u2 template=chatml train_on=last"
    marks = "add_bos=true add_eos=false errors=skip"
    assert reading_words(Config(data=data)) == {"text": f"{words} {marks}"}


def test_a_source_says_for_itself_what_differs() -> None:
    data = Data(split="line", sources={"a": Source("x"), "b": Source("y", split="block", template="plain")})
    assert made(data, "a").reading == Reading(split="line")
    assert made(data, "b").reading == Reading(split="block", chat=True)
    assert made(data, "b").template == TEMPLATES["plain"]
    assert reading_words(Config(data=data)) == {"a": "split=line", "b": "split=block template=plain"}


def test_a_template_of_ones_own_is_a_file_and_counts_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('user = ["Q: ", "\\n"]\nassistant = ["A: ", "."]\n')
    data = Data(template=str(path))
    assert made(data).template == Template(user=("Q: ", "\n"), assistant=("A: ", "."))
    words = reading_words(Config(data=data))["text"]
    assert re.fullmatch("template=[0-9a-f]{16}", words)
    moved = path.rename(tmp_path / "moved.toml")
    assert reading_words(Config(data=Data(template=str(moved))))["text"] == words
    moved.write_text('user = ["Q: ", "\\n"]\nassistant = ["A: ", "!"]\n')
    assert reading_words(Config(data=Data(template=str(moved))))["text"] != words


@pytest.mark.parametrize(("text", "message"), [
    (None, "data.template=@ must be a file, there is none; correct its path or make it"),
    ('user = ["a", "b"]', "data.template.assistant is missing, must be two texts, before and after a message"),
    ('user = ["a"]', "data.template.user=['a'] must be two texts, before and after a message"),
    ('bot = ["a", "b"]', "data.template.bot must be one of system, user, assistant, tool"),
])  # fmt: skip
def test_a_template_that_is_none_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "own.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(message.replace('@', str(path)))}$"):
        made(Data(template=str(path)))


def test_a_template_that_is_neither_a_name_nor_a_file_of_its_own_is_refused() -> None:
    known = "chatml, llama2, llama3, mistral, alpaca, plain, or a .toml file of role = [prefix, suffix]"
    with pytest.raises(ValueError, match=f"^{re.escape(f'data.template=chatlm must be one of {known}')}$"):
        made(Data(template="chatlm"))


@pytest.mark.parametrize(("vocab", "dtype"), [(2, "<u2"), (65536, "<u2"), (65537, "<u4"), (1 << 31, "<u4")])
def test_ids_are_as_wide_as_the_vocabulary_needs(vocab: int, dtype: str) -> None:
    assert ids_dtype(vocab) == np.dtype(dtype)
