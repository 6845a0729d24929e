"""A fuzzer for checkpoints: it changes their structure, signs them again, and judges nnx's reaction.

`samples` makes a few small checkpoints of each format, `edits` changes their content, `documents` takes
files apart and reassembles them with right checksums, `references` reads a changed checkpoint
without nnx, `judging` compares the two in a separate process, and `running` counts and prints.
"""
