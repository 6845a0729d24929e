"""Code that the tests of several packages share: training runs, jobs for worker processes, and fixtures.

Helpers of a single package are in its own ``tests/jobs``. pytest finds the fixtures by itself, because
this distribution is installed; so a package's tests also run if only its folder is present.
"""
