"""``python -m benchmarks run``: all experiments against what people use."""
