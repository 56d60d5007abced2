"""Makes `from tests.scripts import ...` mean this folder, whatever packages called `tests` are installed."""
