"""The processes inside the sandbox of `code_tests`: one for the tests, one for the solution.

The interpreter of `python_tool` runs where the solution does, and `guard` in the place of the tests.

    trainer --order--> test process --requests--> solution process
            <--token--              <--replies---

`wire` turns values into JSON and back, `stand_in` has the stand-ins for objects of the other process, `peer` exchanges
requests on two pipes, and `test_process` and `solution_process` are its two ends. These modules import only the
standard library and each other: the trainer sends them in compiled form.
"""
