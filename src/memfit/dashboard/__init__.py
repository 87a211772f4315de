"""The live page: what the monitor sees, in a browser on the same machine (or elsewhere, with a token).

`feeds` knows what is shown, `api` turns it into JSON, `guard` decides who may ask, `server` serves.
"""

from __future__ import annotations
