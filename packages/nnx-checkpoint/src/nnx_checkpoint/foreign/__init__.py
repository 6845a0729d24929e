"""Checkpoints of other programs than engines, opened as our own: an index into their files.

A foreign checkpoint is read once for its structure; what remains is a table that says in which bytes of
which file each box of each tensor lies. So resuming, merging and converting read only what they need,
and hold none of it. An engine's own checkpoints are read by our package for that engine.
"""
