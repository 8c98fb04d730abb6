"""What runs inside the sandbox of `code_tests`: the tests in one process, the solution in another.

    trainer --order--> test process --requests--> solution process
            <--word---              <--replies---

`wire` turns values into JSON and back, `peer` exchanges requests on two pipes, `test_process` and `solution_process`
are the two ends. They import nothing but the standard library and each other: the trainer sends them in compiled form.
"""
