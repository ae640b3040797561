"""The places where spaces are kept. A new engine is one file here and one line in `registry.py`."""
