"""``nnx diff``: where two training runs begin to differ, in which tensor, and by which kind of fault.

Start reading at `session`, which runs both sides. `recorder` writes records of a run, `record` reads them,
`comparison` finds the first difference, and `verdict` names its kind.
"""
