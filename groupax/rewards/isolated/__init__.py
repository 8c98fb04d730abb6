"""The processes inside the sandbox of `code_tests`: one for the tests, one for the solution.

The interpreter of `python_tool` runs where the solution does, with a guard (`start.main`) in the place of the tests.

    trainer --order--> test process --requests--> solution process
            <--token--              <--replies---

`protocol` exchanges requests and values on two pipes, and `test_process` and `solution_process` are its two ends. These
modules import only the standard library and each other: the trainer sends them in compiled form.
"""
