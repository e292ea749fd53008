"""Put this folder on PYTHONPATH to import `megatrain` from PYTHONPATH and not from an editable install.

The import hook of an editable install comes before the path: a copy of the program, or a core built with sanitizers,
would never be seen, and every test of it would pass for the wrong reason.
"""

from __future__ import annotations

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
