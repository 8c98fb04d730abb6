"""Damaged, foreign and endless datasets: each is refused with a clear error before training, or trains."""

import gzip
import json
import random

import pytest

from groupax.data.examples import load_examples
from groupax.data.prompts import encode_examples

from .test_config_and_data import a_tokenizer

ROW = b'{"prompt": "abc", "answer": "1"}\n'


def prompts_of(dataset):
    """Returns the prompts that a run would train on."""
    tokenizer = a_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return encode_examples(load_examples(dataset), tokenizer, 64, "error", name="train_dataset").examples


def nested(levels):
    return b'{"prompt": "a", "x": ' + b"[" * levels + b"]" * levels + b"}\n"


def message(content, role="user"):
    return json.dumps({"prompt": [{"role": role, "content": content}]}).encode()


# File name, contents, and the expected error; None if it trains.
FILES = {
    "empty.jsonl": (b"", "is empty"),
    "latin1.jsonl": (ROW + '{"prompt": "é"}'.encode("latin-1"), "line 2 is not UTF-8 .*0xe9"),
    "utf16.jsonl": (ROW.decode().encode("utf-16"), "line 1 is not UTF-8"),
    "mark.jsonl": (b"\xef\xbb\xbf" + ROW, None),
    "deep.jsonl": (nested(100_000), "line 1 is nested too deeply"),
    "surrogate.jsonl": (ROW + b'{"prompt": "a\\ud800b"}', "line 2 has half of a surrogate pair"),
    "nul.jsonl": (ROW + b'{"prompt": "a\0b"}', "line 2 is not valid JSON"),
    "cut_off.jsonl": (ROW + ROW[:12], "line 2 is not valid JSON"),
    "lists.jsonl": (b'["abc"]\n', r"line 1: a row must be an object like .* this one is a list"),
    "huge_number.jsonl": (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "line 1 cannot be read"),
    "missing_later.jsonl": (ROW + b'{"answer": "1"}', r"no column 'prompt' \(row 1 has answer\)"),
    "number.jsonl": (ROW + b'{"prompt": 5}', "prompt 1 must be a string or a list of messages .* got 5"),
    "no_text.jsonl": (b'{"prompt": ""}', "prompt 0 is empty"),
    "role_is_number.jsonl": (message("abc", 5), "prompt 0: message 1 of 1 has no role"),
    "no_content.jsonl": (message(None), "message 1 of 1 has no content"),
    "parts.jsonl": (message([{"type": "text", "text": "abc"}]), None),
    "image_part.jsonl": (
        message([{"type": "image"}, {"type": "text", "text": "a"}]),
        "part of type 'image'.* of a model",
    ),
    "image.jsonl": (b'{"prompt": "a", "image": "x.png"}', "has a column 'image', which the model would not see"),
    "no_image.jsonl": (b'{"prompt": "a", "image": null, "images": []}', None),
    "ids.jsonl": (b'{"prompt": "a", "prompt_ids": "abc"}', "prompt 0: the column prompt_ids must have a list of token"),
    "arguments_are_text.jsonl": (b'{"prompt": "a", "chat_template_kwargs": "x"}', "must be a mapping of names"),
    "lines.json": (ROW * 2, "Extra data.*if it has a row on each line, name it .jsonl"),
    "good.csv": (b'prompt,answer\n"abc, ""d""\n",1\n', None),
    "semicolons.csv": (b"prompt;answer\nabc;1\n", r"no column 'prompt' \(row 0 has prompt;answer\)"),
    "ragged.csv": (b"prompt,answer\nabc,1\nabc\n", "line 3 has 1 values for 2 columns"),
    "open_quote.csv": (b'prompt,answer\n"abc,1\n', "line 2 is not valid CSV"),
    "repeated.csv": (b"prompt,prompt\na,b\n", "names a column twice"),
    "rows.jsonl.gz": (gzip.compress(ROW), None),
    "cut.jsonl.gz": (gzip.compress(ROW * 100)[:-20], "cannot be read"),
    "not.parquet": (ROW, "is not a complete Parquet file"),
    "rows.txt": (ROW, r"is not a \.jsonl, \.json, \.csv, \.tsv or \.parquet file"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    content, fault = FILES[name]
    (tmp_path / name).write_bytes(content)
    if fault is None:
        assert prompts_of(tmp_path / name)
        return
    with pytest.raises(ValueError, match=fault) as raised:
        prompts_of(tmp_path / name)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 1000
    assert name in text or "prompt" in text


def test_damaged_parquet_files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "abc" * 9, "answer": str(index)} for index in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    noise = random.Random(0)
    for cut in (10, len(whole) // 2, len(whole) - 9):
        (tmp_path / "a.parquet").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.parquet is not a complete Parquet file"):
            load_examples(tmp_path / "a.parquet")
    for _ in range(20):
        changed = bytearray(whole)
        for _ in range(20):
            changed[noise.randrange(4, len(whole))] = noise.randrange(256)
        (tmp_path / "a.parquet").write_bytes(changed)
        try:
            load_examples(tmp_path / "a.parquet")
        except ValueError as error:
            assert "a.parquet" in str(error)  # noqa: PT017 - there may be no error


def test_several_files(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    (tmp_path / "c.csv").write_text("prompt,answer\nc,1\n")
    assert [row["prompt"] for row in load_examples(str(tmp_path / "*.jsonl"))] == ["a", "b"]
    rows = load_examples([tmp_path / "c.csv", str(tmp_path / "a.jsonl")])
    assert rows == [{"prompt": "c", "answer": "1"}, {"prompt": "a", "answer": None}]
    with pytest.raises(ValueError, match=r"no file matches .*\*\.parquet"):
        load_examples(str(tmp_path / "*.parquet"))
    with pytest.raises(ValueError, match=r"there is no file .*d\.csv; did you mean c\.csv"):
        load_examples([str(tmp_path / "a.jsonl"), str(tmp_path / "d.csv")])
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"it has no \.jsonl, .* file"):
        load_examples(tmp_path / "rows.jsonl")


def test_damaged_folders_of_datasets(tmp_path):
    from datasets import Dataset

    Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "a")
    for name in ("state.json", "dataset_info.json"):
        whole = (tmp_path / "a" / name).read_bytes()
        (tmp_path / "a" / name).write_bytes(b"{")
        with pytest.raises(ValueError, match="is not a complete dataset of save_to_disk"):
            load_examples(tmp_path / "a")
        (tmp_path / "a" / name).write_bytes(whole)
    next((tmp_path / "a").glob("*.arrow")).write_bytes(b"x" * 50)
    with pytest.raises(ValueError, match="is not a complete dataset of save_to_disk"):
        load_examples(tmp_path / "a")


# -- objects


class Arithmetic:
    """Computed rows, as of a `torch.utils.data.Dataset`, which accepts every index."""

    def __init__(self, length=5):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"prompt": f"{index}+{index}=", "answer": str(2 * index)}


class Short(Arithmetic):
    def __getitem__(self, index):
        return [{"prompt": "a"}, {"prompt": "b"}][index]


class Endless:
    def __getitem__(self, index):
        return {"prompt": "a"}


class Broken(Arithmetic):
    def __getitem__(self, index):
        raise RuntimeError("the disk is gone")


def test_rows_that_are_computed_are_counted_by_their_length():
    rows = load_examples(Arithmetic())
    assert [row["prompt"] for row in rows] == ["0+0=", "1+1=", "2+2=", "3+3=", "4+4="]
    assert load_examples(tuple(rows)) == rows
    with pytest.raises(RuntimeError, match="the disk is gone"):
        load_examples(Broken())


def test_tables_have_rows_by_index():
    import pyarrow
    from datasets import Dataset

    hub = Dataset.from_list([{"prompt": "a"}])
    assert load_examples(hub) is hub
    with pytest.raises(ValueError, match=r"is a Table, whose rows have no index; pass the result of its \.to_pylist"):
        load_examples(pyarrow.table({"prompt": ["a"]}))
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"is a DataFrame, .* pass the result of its \.to_dict"):
        load_examples(pandas.DataFrame({"prompt": ["a"]}))


def streamed():
    from datasets import IterableDataset

    return IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: "nobody/nothing", "it cannot be downloaded from the hub"),
        (streamed, r"got a IterableDataset; .*itertools\.islice"),
        (Endless, "another object needs __len__ and __getitem__"),
        (lambda: Arithmetic(0), "train_dataset is empty"),
        (lambda: Short(3), "has a length of 3, but no row 2: IndexError"),
        (lambda: {"train": []}, "is a mapping with the keys train; pick a split"),
        (lambda: [{1: 2, "prompt": "a"}], "row 0 has a column whose name is not a text: 1"),
        (lambda: [{"prompt": "a\ud800"}], "row 0 has half of a surrogate pair"),
        (lambda: ["abc", {"prompt": "a"}], r"no column 'prompt' \(row 0 has str\)"),
        (lambda: ["What is 2+2"], r"a list of files \(What is 2\+2\): there is no file or folder What is 2\+2"),
    ],
)
def test_objects_that_are_not_rows(make, fault):
    with pytest.raises(ValueError, match=fault):
        load_examples(make())


def test_columns_of_images_are_refused_by_their_type():
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image()})
    hub = datasets.Dataset.from_dict({"prompt": ["a"], "picture": [None]}, features=features)
    with pytest.raises(ValueError, match="has a column 'picture', which the model would not see"):
        load_examples(hub)
    assert load_examples(hub.remove_columns("picture"))[0] == {"prompt": "a"}
