"""Its being here puts this folder on the path: tests import `memory_run` and `toy_training`."""
