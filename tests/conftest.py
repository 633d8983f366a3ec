"""Its being here puts the checkout on the path: tests import `tests.memory_run` and the like."""
