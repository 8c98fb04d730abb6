"""Tables keep the names of their rows and columns at every width of a terminal."""

import io

import pytest
from rich.console import Console

from groupax.cli.summary import difference_table, estimate_table
from groupax.evaluation.items import Comparison
from groupax.evaluation.paired import PairedDifference
from groupax.metrics.estimates import Estimate

NAMES = ("reward", "rewards/think_answer_format/mean", "[red]\x1b[31m")
ESTIMATE = Estimate(0.63, 0.584, 0.671, "wilson", 500)
PAIR = PairedDifference(0.356, 0.986, ESTIMATE, 9.6e-92, "mcnemar", 320, 5)


@pytest.mark.parametrize("width", [40, 120])
def test_names_and_values_are_whole_at_every_width(width):
    def printed(table):
        Console(file=(file := io.StringIO()), width=width, highlight=False).print(table)
        assert max(map(len, file.getvalue().splitlines())) <= width
        return file.getvalue()

    lengths = {"completions/mean_length": 12.5}
    both = Comparison(dict.fromkeys(NAMES, PAIR), 500, 0, 0)
    differences = printed(difference_table("eval: before and after", both, lengths, lengths))
    estimates = printed(estimate_table("eval", dict.fromkeys(NAMES, ESTIMATE)))
    for name in (*NAMES[:2], "[red]␛[31m"):
        assert name in differences
        assert name in estimates
    assert differences.count("0.356") == differences.count("0.986") == differences.count("0.630") == len(NAMES)
    assert estimates.count("0.5840 to 0.6710") == len(NAMES)
