"""Common patterns of user code train as in one process, or are refused."""
