"""Open checkpoints of other programs as an index into their files.

Opening a foreign checkpoint reads its structure once, and builds a table with the file and the bytes of each
box of each tensor. So resuming, merging and converting read only the needed bytes, and keep none in memory.
The package of an engine reads that engine's own checkpoints.
"""
