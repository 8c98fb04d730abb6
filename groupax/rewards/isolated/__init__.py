"""The programs inside the sandbox: `code_run` runs a solution with its tests, `interpreter` the code of `python_tool`.

These modules import only the standard library and each other: the trainer sends them as text, and their first frame.
"""
