"""What every Python that a test starts imports first: a lazier garbage collector.

Importing torch and Lightning makes millions of objects that stay. The collector looks at them again and
again, which is a quarter of the time that the import takes, and most of what a test of a script costs.
"""

import gc

gc.set_threshold(20_000, 20, 20)
