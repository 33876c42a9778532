"""One thread per process: the ranks of these tests share few cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
