"""A fuzzer for checkpoints: it changes their structure, signs them again, and judges what nnx makes of them.

`samples` makes a few small checkpoints of each format, `edits` changes what is in them, `documents` takes
files apart and puts them together again with right checksums, `references` reads a changed checkpoint
without nnx, `judging` compares the two in a process of its own, and `running` counts and prints.
"""
