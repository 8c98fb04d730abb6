"""The built-in rewards, on completions with known values and on real data sets."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest

from groupax import rewards
from groupax.rewards import maths
from groupax.rewards.answers import final_number
from tests.conftest import SHARED


def read_lines(*parts):
    path = SHARED.joinpath("data", *parts)
    if not path.is_file():
        pytest.skip(f"no {path}")
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "think", "think_answer", "soft", "strict"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1, 1, 0),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", 1, 1, 1, 1),
        ("so <think>a</think> then <answer>b</answer>.", 0, 0, 1, 0),
        ("<think>a</think>b", 1, 0, 0, 0),
        ("<think>a<think>b</think>", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
        ("<think>a</think><answer>1</answer> junk <answer>2</answer>", 1, 0, 1, 0),
        ("<think>a</think> prose </think><answer>x</answer>", 1, 0, 1, 0),
        ("<think>a</think><answer>1<think>b</think></answer>", 0, 0, 1, 0),
        ("<think>a</think><answer>\n</answer>", 1, 0, 1, 0),
        (" <think> a < b </p> </think>\n<answer> <b>1</b> </answer>\n", 0, 1, 1, 0),
        ("<think>\na\n</think>\n<answer>\nb\n</answer>\n<answer>\nc\n</answer>", 1, 0, 1, 0),
        # the chat template has written <think>
        ("a</think><answer>b</answer>", 1, 1, 1, 0),
        ("a\n</think>\n<answer>\nb\n</answer>", 1, 1, 1, 1),
        ("a</think>b", 1, 0, 0, 0),
        ("a<answer>b</answer>", 0, 0, 0, 0),
    ],
)
def test_formats(text, think, think_answer, soft, strict):
    completions = [text, chat(text)]
    assert rewards.think_format(completions) == [think] * 2
    assert rewards.think_answer_format(completions) == [think_answer] * 2
    assert rewards.xml_format(completions) == [soft] * 2
    assert rewards.xml_format(completions, strict=True) == [strict] * 2


@pytest.mark.parametrize(
    "text",
    [
        "<think>" + "a" * 50_000,
        "<think>\n" + "\n" * 50_000,
        "<think>" * 7_000,
        "<think>a</think>" + " " * 50_000,
        "<think>a</think><answer>" + "</answer" * 7_000,
        "<think>\na\n</think>\n<answer>\n" * 1_500,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_formats_of_long_completions_take_no_time(text):
    started_s = time.monotonic()
    assert rewards.think_format([text])[0] == text.startswith("<think>a</think>")
    assert rewards.think_answer_format([text]) == [0]
    assert rewards.xml_format([text]) == [0]
    assert rewards.xml_format([text], strict=True) == [0]
    assert time.monotonic() - started_s < 1


def test_xml_count_gives_credit_for_each_tag():
    texts = ["<think>a</think><answer>b</answer>", "<think>a<answer>b</answer>", "<think><think>", "x", ""]
    assert rewards.xml_count([*texts, "a</think><answer>b</answer>"]) == [1.0, 0.75, 0.0, 0.0, 0.0, 1.0]
    assert rewards.xml_count(["<think>a</think><answer>b</answer>" + "x" * 100]) == [pytest.approx(0.9)]
    assert rewards.xml_count(["<think>a</think><answer>b</answer>" + "x" * 5000]) == [0.0]
    assert rewards.xml_count(["<a></a>"], tags=("a",)) == [1.0]


def test_integer_answer():
    texts = ["<answer> -12 </answer>", "7", "<answer>3.5</answer>", "<answer>x</answer>", "seven", "<answer></answer>"]
    assert rewards.integer_answer(texts) == [1, 1, 0, 0, 0, 0]


def test_soft_overlong_is_the_papers_curve_in_tokens():
    lengths = [0, 80, 81, 90, 100, 101, 500]
    expected = [0, 0, -0.05, -0.5, -1, -1, -1]
    assert rewards.soft_overlong([[1] * n for n in lengths], max_length=100, buffer=20) == pytest.approx(expected)
    with pytest.raises(ValueError, match="needs a buffer from 1 to max_length = 10, got 11"):
        rewards.soft_overlong([[1]], max_length=10, buffer=11)


def test_repetition_penalty():
    assert rewards.repetition_penalty(["a b c d", "a a a a a", "a b", ""]) == [0, pytest.approx(-2 / 3), 0, 0]
    assert max(rewards.repetition_penalty(["你好吗" * 40, "哈" * 12, "ha" * 200, "x=1;" * 60, "😂" * 30])) < -0.8
    assert rewards.repetition_penalty(["天地玄黄宇宙洪荒日月盈昃辰宿列张", "3.14159265358979323846264"]) == [0, 0]
    assert rewards.repetition_penalty(["x x x"], ngram=1, max_penalty=-3.0) == [pytest.approx(-2.0)]
    with pytest.raises(ValueError, match="needs max_penalty <= 0"):
        rewards.repetition_penalty(["a"], max_penalty=1.0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", 42),
        ("He pays $1,234.50 in all.", 1234.5),
        ("so 5 and then #### -3.0", -3),
        ("<answer>7</answer> 8", 7),
        (r"\boxed{9} of 10", 9),
        ("3 + 4 = 7.", 7),
        ("1,000", 1000),
        ("1,00", 0),
        ("", None),
        ("#### Step 3: Add up\n9 + 9 = 18, so \\boxed{18}", 18),
        ("#### 3. Add up\n<answer>18</answer> and 2", 18),
        ("#### $ 18 of 20", 18),
        (r"\boxed{\text{18}} of 20", 18),
        (r"\boxed{1{,}000} of 20", 1000),
        (r"$1,\!000$", 1000),
        (r"\boxed{18} of \boxed{20", 18),
        ("**Answer:**\n- 18", 18),
        ("it is -$ 18", -18),
        ("3-18", -18),
        (r"\boxed{\frac{1}{2}}", 0.5),
        (r"\boxed{2\frac{1}{2}}", 2.5),
        ("2 1/2", 2.5),
        ("1/2", 0.5),
        ("5/0", None),
        ("it is 1 000", 1000),
        ("1\u202f000.5", 1000.5),
        ("−5", -5),
        ("1e3", 1000),
        (r"1.2 \times 10^{3}", 1200),
        (r"\boxed{18 \text{ cm}^2}", 18),
        (r"-\$1,234.50", -1234.5),
        ("The total is 12 (see note 3).", 12),
        (r"of 3 we know \(18\)", 18),
        ("The answer is 12. There are 3 boxes.", 12),
        ("The answer is 3 + 9 = 12 apples in 2 boxes", 12),
        (r"<think>\boxed{4}</think> 7", 7),
        ("9" * 1000, None),
        ("The answer is 2^3.", 8),
        ("x = 2^{3} = 8", 8),
        ("The answer is 5 or 6", None),
        ("The answer is 5 and 6.", None),
        ("#### 5 or 6", None),
        ("#### 5 6", None),
        ("The answer is 5, 6 more than before", 5),
    ],
)
def test_final_numbers(text, number):
    found = final_number(text)
    assert (None if found is None else float(found)) == number


def test_gsm8k_accuracy_compares_numbers():
    golds = ["x #### 1,000", "#### 0", "5", "no number", "#### 2"]
    texts = ["it is 1000.00", "The answer is 0", "six", "1", chat("#### 2")]
    assert rewards.gsm8k_accuracy(texts, golds) == [1, 1, 0, None, 1]


def test_gsm8k_accuracy_on_all_gold_answers():
    golds = [row["answer"] for row in read_lines("gsm8k", "test.jsonl")]
    assert len(golds) == 1319
    assert rewards.gsm8k_accuracy(golds, golds) == [1.0] * len(golds)
    perturbed = [f"{gold.rpartition('####')[0]}#### {final_number(gold) + 1}" for gold in golds]
    assert rewards.gsm8k_accuracy(perturbed, golds) == [0.0] * len(golds)


def test_verdicts_on_spellings_and_on_wrong_neighbours():
    """Pairs whose truth is known, of which math-verify by itself misjudges more than 60."""
    lines = (Path(__file__).parents[1] / "golden" / "math_answers.txt").read_text().splitlines()[1:]
    num_pairs, misjudged = 0, []
    for gold, *answers in (line.split(" @") for line in lines):
        num_pairs += len(answers)
        truths = [float(answer[0] == "=") for answer in answers]
        verdicts = rewards.math_accuracy([rf"\boxed{{{answer[2:]}}}" for answer in answers], [gold] * len(answers))
        misjudged += [(gold, a) for a, truth, found in zip(answers, truths, verdicts, strict=True) if found != truth]
    assert misjudged == []
    assert num_pairs > 250


@pytest.mark.heavy
def test_the_solutions_of_math500_are_right():
    rows = read_lines("math500", "test.jsonl")
    values = rewards.math_accuracy([row["solution"] for row in rows], [row["answer"] for row in rows])
    assert [row["unique_id"] for row, value in zip(rows, values, strict=True) if value != 1.0] == []


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        # one answer: the last one, and the box before all else
        (r"\boxed{3}, no wait \boxed{4}", "4", 1),
        (r"The final answer is $5$. I hope it is correct. \boxed{6}", "6", 1),
        (r"The final answer is $5$. I hope it is correct. \boxed{6}", "5", 0),
        ("The answer is $3$. No wait, the answer is $4$.", "4", 1),
        (r"<think>\boxed{4}</think> so it is 5", "5", 1),
        (r"\boxed{4} <answer>5</answer>", "5", 1),
        (r"\boxed{\boxed{5}}", "5", 1),
        (r"5 \boxed{}", "5", 0),
        ("the answer is 3 + 9 = 12 in 2 steps", "12", 1),
        ("He has $20, spends $2 and keeps $18.", "18", 1),
        ("The answer is 10 - 2√5.", r"10-2\sqrt{5}", 1),
        (r"so $\boxed\frac{1}{2}$", "1/2", 1),
        (r"I put it in \boxed as asked: 7 \boxed{8}", "8", 1),
        (r"so $\frac{6}{8}$", r"\frac{3}{4}", 1),
        (r"\boxed{0.75}", r"\frac{3}{4}", 1),
        ("3/4", r"\frac{3}{4}", 1),
        ("dunno", r"\frac{3}{4}", 0),
        (r"\boxed{4/3}", r"\frac{3}{4}", 0),
        (r"$x=5$ hence \boxed{x=5}", "5", 1),
        (chat("36"), r"\$36", 1),
        ("1", r"we get \boxed{1}", 1),
        # several candidates are a list
        (r"\boxed{1} and \boxed{2}", "2", 0),
        (r"$\boxed{1}$ or $\boxed{2}$", "1,2", 1),
        # ways to write a number
        ("50%", r"50\%", 1),
        ("1e3", "1000", 1),
        ("0.0000001", 1e-7, 1),
        ("nan", float("nan"), None),
        # nothing to read
        ("", "5", 0),
        (r"\def\a{5}\boxed{\a}", "5", 0),
        ([{"role": "assistant", "content": None}], "5", 0),
        ([{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{5}"}]}], "5", 1),
        (r"\boxed{5}", "", None),
        (r"\boxed{5}", None, None),
    ],
    ids=str,
)  # fmt: skip
def test_which_answers_are_right(text, gold, reward):
    assert rewards.math_accuracy([text], [gold]) == [reward]


@pytest.mark.heavy
@pytest.mark.parametrize("reward", [rewards.math_accuracy, rewards.gsm8k_accuracy])
@pytest.mark.parametrize(
    "text",
    [r"\boxed{", "<answer>", "</think>", "answer is 5 ", r"\(", "$", "(1) ", "1/", "1 111 ", r"\frac{1}", "{", "9"],
)
def test_long_completions_take_little_time(reward, text):
    started_s = time.perf_counter()
    reward([text * (3_000_000 // len(text))], ["5"])
    assert time.perf_counter() - started_s < 20  # quadratic time would take hours


@pytest.mark.heavy
def test_answers_that_never_end_are_wrong_in_any_thread():
    texts = [r"\boxed{4/8}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{4/8}"]
    values = []
    golds = ["0.5", "9^{9^{9}}", "0.5"]
    thread = threading.Thread(target=lambda: values.extend(rewards.math_accuracy(texts, golds)))
    thread.start()
    thread.join()
    assert values == rewards.math_accuracy(texts, golds) == [1.0, 0.0, 1.0]


def test_a_comparing_process_that_does_not_start_is_no_wrong_answer(monkeypatch):
    monkeypatch.setattr(maths.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        maths.Comparer()("1", "1")


def test_rows_without_a_gold_answer_have_no_reward():
    right = [
        "<think>x</think><answer>None</answer>",
        "<think>x</think><answer>4</answer>",
        "x</think><answer>4</answer>",
    ]
    assert rewards.think_answer_correct(right, [None, "4", "4"]) == [None, 1.0, 1.0]
