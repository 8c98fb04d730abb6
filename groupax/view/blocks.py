"""Many lines of metrics at once, parsed by Arrow while other threads work."""

import io
from collections.abc import Mapping

import numpy as np

NULL = -1.7e308  # stands for null, which Arrow does not tell from a name that a line does not have


def columns_of(block: bytes) -> Mapping[str, tuple[np.ndarray, np.ndarray]] | None:
    """Returns the rows and values of the numbers in lines of JSON, by name.

    Args:
        block: Whole lines.

    Returns:
        rows: The lines that have the name, ascending.
        values: Their values as float64, NaN for null.
        None if Arrow cannot read the lines, or if one of them has no step: these are for a reader of single lines.
    """
    import pyarrow
    from pyarrow import json

    try:
        content = block.replace(b"null", repr(NULL).encode())
        options = json.ReadOptions(use_threads=False, block_size=len(content) + 1)
        table = json.read_json(io.BytesIO(content), read_options=options)
    except pyarrow.ArrowException:
        return None
    if len(set(table.column_names)) != table.num_columns or table.num_rows != block.count(b"\n"):
        return None
    kinds = dict(zip(table.column_names, table.schema.types, strict=True))
    is_number = pyarrow.types.is_floating, pyarrow.types.is_integer
    found = {}
    for name in (name for name, kind in kinds.items() if any(check(kind) for check in is_number)):
        column = table.column(name)
        rows = np.flatnonzero(column.is_valid().to_numpy())
        values = column.drop_null().cast(pyarrow.float64(), safe=False).to_numpy()
        found[name] = rows, np.where(np.isfinite(values) & (values != NULL), values, np.nan)
    steps = found.get("step")
    return None if steps is None or len(steps[0]) != table.num_rows or np.isnan(steps[1]).any() else found
