"""Tools for testing Holdfast and what is built on it; shipped, because engines are also written elsewhere.

`conformance` is the suite every engine passes. It needs pytest, pytest-asyncio and hypothesis; importing `holdfast` needs
none of them.
"""

import pytest

pytest.register_assert_rewrite("holdfast.testing.conformance")
