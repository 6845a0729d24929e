"""What the tests of several packages share: training runs, jobs for worker processes, and fixtures.

What only one package's tests use is in its own ``tests/jobs``. pytest finds the fixtures by itself, because
this distribution is installed; so a package's tests also run where its folder is alone.
"""
